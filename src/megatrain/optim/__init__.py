"""The optimizer users hold, its arithmetic, and when updates run."""
