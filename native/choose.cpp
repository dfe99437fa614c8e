// Chooses the kernels that this processor runs.
#include <cstring>

#include "kernels.h"

namespace streamspec {
namespace avx512vnni { extern const Kernels kKernels; }

const Kernels* choose_kernels(const char*) { return &avx512vnni::kKernels; }
}
