// Products of many rows with weights of 8 and 6 bits by AMX; all else is that of AVX-512. On Linux:
// a process must ask for these registers, elsewhere in other ways.
#if defined(__linux__)
#define STREAMSPEC_ISA amx
#include "simd_avx512.h"

#include "kernels/matrix_rows.inl.h"

namespace streamspec {
namespace avx512vnni {
extern const Kernels kKernels;
}
namespace amx {

// `Kernels::linear`; declared again in choose.cpp.
void linear(const Linear& map, const Rows& x, size_t from, size_t to, float* y);

void linear(const Linear& map, const Rows& x, size_t from, size_t to, float* y) {
    // Sums of blocks must be scaled one by one, which takes as long as their products do.
    const bool few = x.rows < kFewestRows || map.bits == 4 || map.stored;
    (few             ? avx512vnni::kKernels.linear
     : map.bits == 8 ? matrix_linear<8>
                     : matrix_linear<6>)(map, x, from, to, y);
}

}  // namespace amx
}  // namespace streamspec
#endif
