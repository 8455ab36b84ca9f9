"""Finding the blocks of a model, and what has to be known about transformers."""
