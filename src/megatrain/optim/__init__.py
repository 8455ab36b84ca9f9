"""The optimizer, its update rules, and the scheduling of updates."""
