"""The native library: finding it, and one typed Python function per C function."""
