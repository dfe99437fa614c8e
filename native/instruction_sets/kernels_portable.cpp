#define STREAMSPEC_ISA portable
#include "simd_portable.h"

#include "kernels/kernels.inl.h"
