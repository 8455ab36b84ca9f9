"""`python -m megatrain` is the command `megatrain`."""

from megatrain.cli.main import main

main()
