"""The command `megatrain`: one file per command."""
