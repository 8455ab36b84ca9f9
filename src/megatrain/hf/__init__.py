"""Hugging Face: the Trainer, the mixin for other trainers, and data preparation."""
