#define STREAMSPEC_ISA avx2
#define STREAMSPEC_AVXVNNI 0
#include "simd_avx2.h"

#include "kernels/kernels.inl.h"
