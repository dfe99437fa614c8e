#define STREAMSPEC_ISA neon
#define STREAMSPEC_DOTPROD 0
#include "simd_neon.h"

#include "kernels/kernels.inl.h"
