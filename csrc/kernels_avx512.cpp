#define MT_ISA avx512
#include "kernels.inl"
