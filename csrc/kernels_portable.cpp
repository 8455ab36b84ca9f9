#define MT_ISA portable
#include "kernels.inl"
