#define STREAMSPEC_ISA portable
#include "simd_portable.h"
//
#include "kernels.inl.h"
