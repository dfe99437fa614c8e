// What nodes with quantized weights have in common: the weights' constants and attributes, checked,
// as the kernels read them. Covered by the tests of LinearInt8 and those beside it.
#pragma once

#include <array>
#include <cstring>
#include <vector>

#include "operators/kernel_call.h"

namespace streamspec {

constexpr size_t kMaxInFeatures = 1u << 17, kMaxOutFeatures = 1u << 22, kMaxMaps = 1u << 12;
constexpr int kStored = 0;  // in place of bits: a file's own blocks

inline bool divides(const Linear& map, size_t size) { return map.in_features % size == 0; }

// `values` [maps * out_features] in the order of the codes, padded with zeros to whole tiles.
inline std::vector<float> in_tiles(const Tensor& values, const Linear& map, size_t maps) {
    std::vector<float> out(maps * map.tiles * kTile, 0.0f);
    const size_t half = map.out_features / 2;
    for (size_t at = 0; at < out.size(); at++) {
        const size_t i = at % kTile, tile = at / kTile % map.tiles;
        const size_t output =
            map.gated ? i / kLanes * half + tile * kLanes + i % kLanes : tile * kTile + i;
        if (output < map.out_features)
            out[at] = values.floats()[at / kTile / map.tiles * map.out_features + output];
    }
    return out;
}

// Weights and attributes of a node, whose inputs from `first` on are codes, scales, zero points (4
// bits alone) or multipliers, minima, their multipliers and a table (stored blocks alone), and a
// bias. `stacked`: of several maps of one size, one after the other along the first axis, whole
// tiles of each.
class LinearMap {
  protected:
    LinearMap(const char* op, const ort::KernelInfo* info, int bits, size_t first = 1,
              bool stacked = false)
        : first_(first) {
        const size_t bias_index = first + (bits == 4 ? 3 : bits == kStored ? 6 : 2);
        const Tensor codes = constant(info, first), scales = constant(info, first + 1);
        const Tensor zeros = bits == 4 ? constant(info, first + 2) : Tensor{};
        const Tensor bias = constant(info, bias_index);
        for (size_t index = first + 2; index <= bias_index; index++)
            if (!constant(info, index).exists()) left_out_.push_back(index);
        if (stacked) maps_ = size_attribute(op, info, "maps");
        if (maps_ == 0 || maps_ > kMaxMaps)
            fail(op, "maps " + std::to_string(maps_), "1 to " + std::to_string(kMaxMaps));
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
            expect(op, "a bias", bias, ort::kFloat, {maps_ * map_.out_features});
            bias_ = in_tiles(bias, map_, maps_);
            map_.bias = bias_.data();
        }
    }

    // Fails where an optional input is there now that was no constant.
    void refuse_computed(const char* op, const Call& call) const {
        for (size_t index : left_out_)
            if (call.value(index))
                fail(op, "optional weights or a bias that are no constants", "constants");
    }

    // The first of the maps, and one of them.
    const Linear& map() const { return map_; }
    size_t maps() const { return maps_; }
    Linear map(size_t index) const {
        Linear out = map_;
        const size_t tiles = index * map_.tiles, in = map_.in_features;
        const size_t unit = map_.bits == 8 ? 4 : map_.bits == 6 ? 16 : 8;
        const size_t tile_bytes = round_up(in, unit) * kTile / 8 * static_cast<size_t>(map_.bits);
        const size_t blocks = map_.block_size ? in / map_.block_size : 0;
        const size_t supers = map_.stored ? in / (map_.multipliers ? 256 : 32) : blocks;
        const auto move = [&](auto*& pointer, size_t of_tile) {
            if (pointer) pointer += tiles * of_tile * kTile;
        };
        out.codes = static_cast<const char*>(map_.codes) + tiles * tile_bytes;
        move(out.scales, 1);
        move(out.bias, 1);
        move(out.block_scales, supers);
        move(out.minima, supers);
        move(out.zero_points, blocks);
        move(out.multipliers, blocks);
        move(out.minimum_multipliers, blocks);
        return out;
    }

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
        map_.alpha = finite_attribute(op, info, "alpha", 1.0f);
        map_.limit = finite_attribute(op, info, "limit", 0.0f);
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
        if (map_.limit < 0.0f || (map_.limit > 0.0f && !map_.gated))
            fail(op, "limit " + std::to_string(map_.limit), "0, or more of a gated map");
    }

    // 8 and 6 bits: a scale for each output.
    void set_rows(const char* op, const Tensor& codes, const Tensor& scales) {
        const size_t in = map_.in_features;
        if (map_.bits == 8)
            expect(op, "codes", codes, ort::kInt8, {tiles(), (in + 3) / 4, kTile, 4});
        else
            expect(op, "codes", codes, ort::kUint8, {tiles(), (in + 15) / 16, 2, 3, kLanes, 4});
        expect(op, "scales", scales, ort::kFloat, {maps_ * map_.out_features});
        scales_ = in_tiles(scales, map_, maps_);
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
        expect(op, "codes", codes, ort::kUint8, {tiles(), map_.in_features / 8, kTile, 4});
        expect(op, "scales", scales, ort::kFloat16, {tiles(), blocks, kTile});
        if (zeros.exists()) expect(op, "zero points", zeros, ort::kUint8, {tiles(), blocks, kTile});
        map_.block_scales = scales.as<uint16_t>();
        map_.zero_points = zeros.as<uint8_t>();
    }

    // A file's own blocks: codes of 4, 6 or 8 bits, scales, and what they may have beside them.
    void set_stored(const char* op, const ort::KernelInfo* info, const Tensor& codes,
                    const Tensor& scales) {
        const Tensor multipliers = constant(info, first_ + 2), minima = constant(info, first_ + 3);
        const Tensor minimum_multipliers = constant(info, first_ + 4);
        const Tensor table = constant(info, first_ + 5);
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
            expect(op, "codes", codes, ort::kUint8, {tiles(), in / 16, 2, 3, kLanes, 4});
        else
            expect(op, "codes", codes, ort::kUint8, {tiles(), in / (bits == 4 ? 8 : 4), kTile, 4});
        expect(op, "scales", scales, ort::kFloat16, {tiles(), supers, kTile});
        for (const Tensor& each : {multipliers, minimum_multipliers})
            if (each.exists())
                expect(op, "multipliers", each, ort::kInt8, {tiles(), in / block, kTile});
        if (minima.exists()) expect(op, "minima", minima, ort::kFloat16, {tiles(), supers, kTile});
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

    size_t tiles() const { return maps_ * map_.tiles; }

    Linear map_{};
    size_t first_, maps_ = 1;
    std::array<int8_t, 64> table_{};
    std::vector<float> scales_, bias_;
    std::vector<size_t> left_out_;  // indices of inputs
};

}  // namespace streamspec
