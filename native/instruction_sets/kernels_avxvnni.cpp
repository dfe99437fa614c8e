#define STREAMSPEC_ISA avxvnni
#define STREAMSPEC_AVXVNNI 1
#include "simd_avx2.h"

#include "kernels/kernels.inl.h"
