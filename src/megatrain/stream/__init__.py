"""State in motion: lanes, weight slots, gradients out, and the record of it."""
