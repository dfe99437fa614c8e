// SkipRmsNorm and ArgMax: operators that take the rows of a tensor for themselves.
#include <cmath>

#include "operators/custom_op.h"

namespace streamspec {
namespace {

constexpr size_t kMaxNormWidth = 1u << 17;

// Inputs: x, weight, update. Outputs: the norm of x + update, and x + update.
struct SkipRmsNormKernel {
    static constexpr const char* kName = "SkipRmsNorm";
    float eps;

    explicit SkipRmsNormKernel(const ort::KernelInfo* info)
        : eps(attribute(kName, info, "eps", 1e-6f)) {
        if (!(eps >= 0.0f && std::isfinite(eps)))
            fail(kName, "eps " + std::to_string(eps), "a number from 0");
    }

    void compute(const Call& call) const {
        const Tensor x = call.input(0), weight = call.input(1), update = call.input(2);
        if (x.type != ort::kFloat || x.dims.empty() || x.dim(1) == 0 || x.dim(1) % kLanes != 0 ||
            x.dim(1) > kMaxNormWidth)
            fail(
                kName, "rows " + to_text(x),
                "float32 rows of a multiple of 16 numbers, up to " + std::to_string(kMaxNormWidth));
        const size_t width = x.dim(1), rows = x.count() / width;
        expect(kName, "a weight", weight, ort::kFloat, {width});
        if (update.exists()) expect(kName, "an update", update, ort::kFloat, x.dims);
        float* y = call.output<float>(0, x.dims);
        float* sum = call.outputs() > 1 ? call.output<float>(1, x.dims) : nullptr;
        call.parallel_rows(rows, [&](size_t from, size_t to) {
            kernels().norm(x.floats(), update.floats(), weight.floats(), eps, width, from, to, sum,
                           y);
        });
    }
};

// Input: x [.., width]. Output: the place of the first of the largest of each row, int64 [..].
struct ArgMaxKernel {
    static constexpr const char* kName = "ArgMax";
    explicit ArgMaxKernel(const ort::KernelInfo*) {}

    void compute(const Call& call) const {
        const Tensor x = call.input(0);
        if (x.type != ort::kFloat || x.dims.empty() || x.dim(1) == 0)
            fail(kName, "rows " + to_text(x), "float32 [.., 1 or more]");
        const size_t width = x.dim(1), rows = x.count() / width;
        Dims dims = x.dims;
        dims.pop_back();
        int64_t* y = call.output<int64_t>(0, dims);
        call.parallel(rows, [&](size_t row) {
            y[row] = static_cast<int64_t>(kernels().argmax(x.floats() + row * width, width));
        });
    }
};

}  // namespace

std::vector<const ort::CustomOp*> row_operators() {
    using ort::kFloat, ort::kInt64;
    static const Op<SkipRmsNormKernel> norm({{kFloat, kFloat, kFloat}, {kFloat, kFloat}, 2, 1});
    static const Op<ArgMaxKernel> argmax({{kFloat}, {kInt64}, 1});
    return {&norm, &argmax};
}

}  // namespace streamspec
