#define STREAMSPEC_ISA avx512vnni
#include "simd_avx512.h"

#include "kernels/kernels.inl.h"
