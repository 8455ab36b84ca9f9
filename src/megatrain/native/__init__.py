"""The C library: how it is found, and one typed Python function per C function."""

from megatrain.native.library import copy, touch

__all__ = ["copy", "touch"]
