// LinearInt8, LinearInt6, LinearInt4 and LinearBlocks: rows times quantized weights, gated and
// activated where the node says so; EmbeddingInt8, EmbeddingInt6 and EmbeddingBlocks: rows of the
// same weights as a table.
#include <algorithm>
#include <cstring>

#include "operators/custom_op.h"
#include "operators/linear_map.h"

namespace streamspec {
namespace {

template <int Bits>
class LinearKernel : LinearMap {
  public:
    static constexpr const char* kName = Bits == 8   ? "LinearInt8"
                                         : Bits == 6 ? "LinearInt6"
                                         : Bits == 4 ? "LinearInt4"
                                                     : "LinearBlocks";
    explicit LinearKernel(const ort::KernelInfo* info) : LinearMap(kName, info, Bits) {}

    void compute(const Call& call) const {
        refuse_computed(kName, call);
        const Tensor x = call.input(0);
        const size_t in = map().in_features;
        if (x.type != ort::kFloat || x.dims.empty() || x.dim(1) != in)
            fail(kName, "rows " + to_text(x), "float32 [.., " + std::to_string(in) + "]");
        Dims dims = x.dims;
        dims.set_back(map().width());
        float* y = call.output<float>(0, dims);
        if (const size_t rows = x.count() / in) multiply(call, x.floats(), rows, y);
    }

  private:
    void multiply(const Call& call, const float* x, size_t rows, float* y) const {
        const Linear& map = this->map();
        const Rows quantized = quantized_rows(rows);
        call.parallel_rows(rows, [&](size_t from, size_t to) {
            kernels().quantize(map, x, from, to, quantized,
                               scratch<Scratch::kTask>(quantized.stride));
        });
        constexpr size_t kSmallWork = 1 << 15;  // bytes of weights that one thread multiplies alone
        constexpr size_t kMaxPieces = 16;
        const size_t bytes = map.tiles * kTile * map.in_features * map.bits / 8;
        const size_t pieces = bytes * rows <= kSmallWork ? 1 : std::min(map.tiles, kMaxPieces);
        call.parallel(pieces, [&](size_t piece) {
            kernels().linear(map, quantized, map.tiles * piece / pieces,
                             map.tiles * (piece + 1) / pieces, y);
        });
    }

    // Memory for quantized rows: codes, then scales and sums, which start at whole vectors.
    Rows quantized_rows(size_t rows) const {
        Rows out{};
        out.rows = rows;
        out.stride = round_up(map().in_features, kRowAlign);
        out.blocks = map().block_size ? map().in_features / map().block_size : 1;
        const size_t codes = out.stride / sizeof(float) * rows;
        const size_t numbers = round_up(rows * out.blocks, kLanes);
        float* memory = scratch<Scratch::kQuantizedRows>(codes + 3 * numbers);
        out.codes = reinterpret_cast<int8_t*>(memory);
        out.scales = memory + codes;
        out.sums4 = out.scales + numbers;
        out.sums8 = reinterpret_cast<int32_t*>(out.sums4 + numbers);
        return out;
    }
};

template <int Bits>
class EmbeddingKernel : LinearMap {
  public:
    static constexpr const char* kName = Bits == 8   ? "EmbeddingInt8"
                                         : Bits == 6 ? "EmbeddingInt6"
                                                     : "EmbeddingBlocks";
    explicit EmbeddingKernel(const ort::KernelInfo* info) : LinearMap(kName, info, Bits) {
        if (map().gated) fail(kName, "a gated table", "gated 0");
    }

    void compute(const Call& call) const {
        const Tensor ids = call.input(0);
        if (ids.type != ort::kInt64 || ids.dims.size() == kMaxDims)
            fail(kName, "ids " + to_text(ids), "int64, of 7 dimensions at most");
        const size_t width = map().in_features;
        const auto rows = static_cast<int64_t>(map().out_features);
        Dims dims = ids.dims;
        dims.push_back(width);
        float* y = call.output<float>(0, dims);
        for (size_t i = 0; i < ids.count(); i++) {
            const int64_t id = ids.as<int64_t>()[i];
            if (id < -rows || id >= rows)
                fail(kName, "id " + std::to_string(id),
                     std::to_string(-rows) + " to " + std::to_string(rows - 1));
            float* row = scratch<Scratch::kTask>(round_up(width, kRowAlign));
            kernels().look_up(map(), static_cast<size_t>(id < 0 ? id + rows : id), row);
            std::memcpy(y + i * width, row, width * sizeof(float));
        }
    }
};

}  // namespace

std::vector<const ort::CustomOp*> linear_operators() {
    using ort::kFloat, ort::kFloat16, ort::kInt64, ort::kInt8, ort::kUint8;
    static const Op<LinearKernel<8>> linear8({{kFloat, kInt8, kFloat, kFloat}, {kFloat}, 3});
    static const Op<LinearKernel<6>> linear6({{kFloat, kUint8, kFloat, kFloat}, {kFloat}, 3});
    static const Op<LinearKernel<4>> linear4(
        {{kFloat, kUint8, kFloat16, kUint8, kFloat}, {kFloat}, 3});
    static const Op<EmbeddingKernel<8>> embedding8({{kInt64, kInt8, kFloat}, {kFloat}, 3});
    static const Op<EmbeddingKernel<6>> embedding6({{kInt64, kUint8, kFloat}, {kFloat}, 3});
    static const Op<LinearKernel<kStored>> linear_blocks(
        {{kFloat, kUint8, kFloat16, kInt8, kFloat16, kInt8, kInt8, kFloat}, {kFloat}, 3});
    static const Op<EmbeddingKernel<kStored>> embedding_blocks(
        {{kInt64, kUint8, kFloat16, kInt8, kFloat16, kInt8, kInt8}, {kFloat}, 3});
    return {&linear8,    &linear6,    &linear4,         &linear_blocks,
            &embedding8, &embedding6, &embedding_blocks};
}

}  // namespace streamspec
