// LinearInt8, LinearInt6, LinearInt4 and LinearBlocks: rows times quantized weights, gated and
// activated where the node says so; EmbeddingInt8, EmbeddingInt6 and EmbeddingBlocks: rows of the
// same weights as a table.
#include <algorithm>
#include <array>
#include <cstring>

#include "operators/custom_op.h"

namespace streamspec {
namespace {

constexpr size_t kMaxInFeatures = 1u << 17, kMaxOutFeatures = 1u << 22;
constexpr int kStored = 0;  // in place of bits: a file's own blocks

bool divides(const Linear& map, size_t size) { return map.in_features % size == 0; }

// `values` [out_features] in the order of the codes, padded with zeros to whole tiles.
std::vector<float> in_tiles(const Tensor& values, const Linear& map) {
    std::vector<float> out(map.tiles * kTile, 0.0f);
    const size_t half = map.out_features / 2;
    for (size_t tile = 0; tile < map.tiles; tile++)
        for (size_t i = 0; i < kTile; i++) {
            const size_t output =
                map.gated ? i / kLanes * half + tile * kLanes + i % kLanes : tile * kTile + i;
            if (output < map.out_features) out[tile * kTile + i] = values.floats()[output];
        }
    return out;
}

// Weights and attributes of a node, whose inputs are x or ids, codes, scales, zero points (4 bits
// alone) or multipliers, minima, their multipliers and a table (stored blocks alone), and a bias.
class LinearMap {
  protected:
    LinearMap(const char* op, const ort::KernelInfo* info, int bits) {
        const size_t bias_index = bits == 4 ? 4 : bits == kStored ? 7 : 3;
        const Tensor codes = constant(info, 1), scales = constant(info, 2);
        const Tensor zeros = bits == 4 ? constant(info, 3) : Tensor{};
        const Tensor bias = constant(info, bias_index);
        for (size_t index = 3; index <= bias_index; index++)
            if (!constant(info, index).exists()) left_out_.push_back(index);
        map_.stored = bits == kStored;
        map_.bits = map_.stored ? static_cast<int>(attribute<int64_t>(op, info, "bits", 8)) : bits;
        read_attributes(op, info);
        if (!codes.exists() || !scales.exists())
            fail(op, "codes or scales that are no constants", "constants");
        if (map_.stored)
            set_stored(op, info, codes, scales);
        else if (bits == 4)
            set_blocks(op, codes, scales, zeros);
        else
            set_rows(op, codes, scales);
        map_.codes = codes.data;
        if (bias.exists()) {
            expect(op, "a bias", bias, ort::kFloat, {map_.out_features});
            bias_ = in_tiles(bias, map_);
            map_.bias = bias_.data();
        }
    }

    // Fails where an optional input is there now that was no constant.
    void refuse_computed(const char* op, const Call& call) const {
        for (size_t index : left_out_)
            if (call.value(index))
                fail(op, "optional weights or a bias that are no constants", "constants");
    }

    const Linear& map() const { return map_; }

  private:
    void read_attributes(const char* op, const ort::KernelInfo* info) {
        const int64_t activation = attribute<int64_t>(op, info, "activation", 0);
        const size_t in = map_.in_features = size_attribute(op, info, "in_features");
        const size_t out = map_.out_features = size_attribute(op, info, "out_features");
        const bool blocks = map_.stored || map_.bits == 4;
        map_.block_size = blocks ? size_attribute(op, info, "block_size", 32) : 0;
        const size_t mix = map_.mix = size_attribute(op, info, "mix");
        map_.gated = flag_attribute(op, info, "gated");
        map_.activation = static_cast<Activation>(activation);
        map_.tiles = (out + kTile - 1) / kTile;
        const std::string in_text = std::to_string(in), out_text = std::to_string(out);
        if (in == 0 || in > kMaxInFeatures || out == 0 || out > kMaxOutFeatures)
            fail(op, "in_features " + in_text + " and out_features " + out_text,
                 "1 to " + std::to_string(kMaxInFeatures) + " and 1 to " +
                     std::to_string(kMaxOutFeatures));
        if (mix != 0 && ((mix != 8 && mix != 16 && mix != 32) || !divides(map_, mix)))
            fail(op, "mix " + std::to_string(mix) + " of " + in_text + " inputs",
                 "0, or a divisor of 8, 16 or 32");
        if (activation < 0 || activation > static_cast<int64_t>(Activation::kRelu2))
            fail(op, "activation " + std::to_string(activation), "0 to 4");
        if (map_.gated && out % kTile != 0)
            fail(op, "a gated map of " + out_text + " outputs", "a multiple of 32");
    }

    // 8 and 6 bits: a scale for each output.
    void set_rows(const char* op, const Tensor& codes, const Tensor& scales) {
        const size_t in = map_.in_features;
        if (map_.bits == 8)
            expect(op, "codes", codes, ort::kInt8, {map_.tiles, (in + 3) / 4, kTile, 4});
        else
            expect(op, "codes", codes, ort::kUint8, {map_.tiles, (in + 15) / 16, 2, 3, kLanes, 4});
        expect(op, "scales", scales, ort::kFloat, {map_.out_features});
        scales_ = in_tiles(scales, map_);
        map_.scales = scales_.data();
    }

    // 4 bits: a scale, and a zero point, for each block of inputs of an output.
    void set_blocks(const char* op, const Tensor& codes, const Tensor& scales,
                    const Tensor& zeros) {
        const size_t block = map_.block_size;
        if ((block != 32 && block != 64 && block != 128) || !divides(map_, block))
            fail(op,
                 "block_size " + std::to_string(block) + " of " + std::to_string(map_.in_features) +
                     " inputs",
                 "a divisor of 32, 64 or 128");
        const size_t blocks = map_.in_features / block;
        expect(op, "codes", codes, ort::kUint8, {map_.tiles, map_.in_features / 8, kTile, 4});
        expect(op, "scales", scales, ort::kFloat16, {map_.tiles, blocks, kTile});
        if (zeros.exists())
            expect(op, "zero points", zeros, ort::kUint8, {map_.tiles, blocks, kTile});
        map_.block_scales = scales.as<uint16_t>();
        map_.zero_points = zeros.as<uint8_t>();
    }

    // A file's own blocks: codes of 4, 6 or 8 bits, scales, and what they may have beside them.
    void set_stored(const char* op, const ort::KernelInfo* info, const Tensor& codes,
                    const Tensor& scales) {
        const Tensor multipliers = constant(info, 3), minima = constant(info, 4);
        const Tensor minimum_multipliers = constant(info, 5), table = constant(info, 6);
        const int64_t bits = attribute<int64_t>(op, info, "bits", 8);
        const int64_t offset = attribute<int64_t>(op, info, "offset", 0);
        const size_t block = map_.block_size, in = map_.in_features;
        const bool scaled = multipliers.exists(), has_table = table.exists();
        if (bits != 4 && bits != 6 && bits != 8)
            fail(op, "bits " + std::to_string(bits), "4, 6 or 8");
        if (offset < 0 || offset > 63 || (offset != 0 && (bits == 8 || has_table)))
            fail(op, "offset " + std::to_string(offset), "0 to 63, 0 of 8 bits and of a table");
        if (map_.mix != 0) fail(op, "mix " + std::to_string(map_.mix), "0");
        if (block != 32 && (block != 16 || !scaled || bits == 8 || has_table))
            fail(op, "block_size " + std::to_string(block),
                 "32, or 16 with multipliers, in 4 or 6 bits, without a table");
        if (!divides(map_, scaled ? 256 : 32))
            fail(op, "in_features " + std::to_string(in),
                 scaled ? "a multiple of 256 where there are multipliers" : "a multiple of 32");
        if (has_table && bits != 4) fail(op, "a table of codes of another width", "4 bits");
        if (minimum_multipliers.exists() != (scaled && minima.exists()))
            fail(op, "multipliers of scales or of minima alone", "both, or no minima");
        const size_t supers = in / (scaled ? 256 : 32);
        if (bits == 6)
            expect(op, "codes", codes, ort::kUint8, {map_.tiles, in / 16, 2, 3, kLanes, 4});
        else
            expect(op, "codes", codes, ort::kUint8,
                   {map_.tiles, in / (bits == 4 ? 8 : 4), kTile, 4});
        expect(op, "scales", scales, ort::kFloat16, {map_.tiles, supers, kTile});
        for (const Tensor& each : {multipliers, minimum_multipliers})
            if (each.exists())
                expect(op, "multipliers", each, ort::kInt8, {map_.tiles, in / block, kTile});
        if (minima.exists())
            expect(op, "minima", minima, ort::kFloat16, {map_.tiles, supers, kTile});
        map_.offset = static_cast<int>(offset);
        map_.block_scales = scales.as<uint16_t>();
        map_.multipliers = multipliers.as<int8_t>();
        map_.minima = minima.as<uint16_t>();
        map_.minimum_multipliers = minimum_multipliers.as<int8_t>();
        if (has_table) {
            expect(op, "a table", table, ort::kInt8, {16});
            for (size_t i = 0; i < 4; i++) std::memcpy(table_.data() + 16 * i, table.data, 16);
            map_.table = table_.data();
        }
    }

    Linear map_{};
    std::array<int8_t, 64> table_{};
    std::vector<float> scales_, bias_;
    std::vector<size_t> left_out_;  // indices of inputs
};

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
