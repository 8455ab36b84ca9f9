"""Running a block: the stateless call, the autograd node around it, and what must be replayed."""
