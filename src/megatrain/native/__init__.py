"""The C library: how it is found, and one typed Python function per C function."""
