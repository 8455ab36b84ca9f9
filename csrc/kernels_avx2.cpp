#define MT_ISA avx2
#include "kernels.inl"
