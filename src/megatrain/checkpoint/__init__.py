"""Saving and resuming: ordinary HF directories, and our exact states beside them."""
