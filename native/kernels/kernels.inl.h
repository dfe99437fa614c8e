// The table of kernels, over the lanes of one instruction set (`simd_*.h`, included before this
// file).
#include "kernels/attention.inl.h"
#include "kernels/blocks.inl.h"
#include "kernels/delta_rule.inl.h"
#include "kernels/linear.inl.h"
#include "kernels/rows.inl.h"
#include "kernels/state_space.inl.h"

namespace streamspec::STREAMSPEC_ISA {

#define STREAMSPEC_TEXT(name) #name
#define STREAMSPEC_NAME(name) STREAMSPEC_TEXT(name)
extern const Kernels kKernels;
// Known to the compiler: a file of these instructions must run nothing where the library is loaded.
constexpr Kernels kKernels = {STREAMSPEC_NAME(STREAMSPEC_ISA),
                              quantize_rows,
                              multiply,
                              look_up_row,
                              store_keys,
                              attend,
                              norm,
                              delta_rule,
                              state_space,
                              argmax};

}  // namespace streamspec::STREAMSPEC_ISA
