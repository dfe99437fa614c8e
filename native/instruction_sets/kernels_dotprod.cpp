#define STREAMSPEC_ISA dotprod
#define STREAMSPEC_DOTPROD 1
#include "simd_neon.h"

#include "kernels/kernels.inl.h"
