// Linear maps whose weights are the blocks of a file: rows with a scale for each 32 inputs times
// codes of 8, 6 or 4 bits with scales and minima of their own; and rows of such weights as a table.
#pragma once

#include "kernels/linear.inl.h"

namespace streamspec::STREAMSPEC_ISA {
namespace {

constexpr size_t kScaled = 32;   // inputs of a row that share a scale
constexpr size_t kSupers = 256;  // inputs that share a scale of multipliers

template <bool Signed>
inline auto code_type() {
    if constexpr (Signed)
        return Bytes{};
    else
        return Nibbles{};
}

template <bool OfNibbles>
inline auto sum_type() {
    if constexpr (OfNibbles)
        return NibbleSum{};
    else
        return Ints{};
}

// Codes as they lie in a tile: bytes of 16 outputs with `kInputs` inputs, in groups of four.
// `Kind`: bits, or 0: 4 bits through a table.
template <int Kind>
struct Coded {
    static constexpr int kBits = Kind ? Kind : 4;
    static constexpr bool kSigned = Kind == 0 || Kind == 8;
    static constexpr size_t kInputs = kBits == 4 ? 8 : kBits == 6 ? 16 : 4;
    static constexpr size_t kGroups = kInputs / 4, kBytes = kBits == 6 ? kBytes6 : kBytes8;
    using Weights = decltype(code_type<kSigned>());

    // Of half a tile, for `work` products of each byte.
    static STREAMSPEC_INLINE void load(const uint8_t* at, const Bytes& table, int work,
                                       Weights (&out)[kGroups][1]) {
        if constexpr (kBits == 8) {
            out[0][0] = load_weights(reinterpret_cast<const int8_t*>(at));
        } else if constexpr (kBits == 6) {
            Nibbles half[4];
            load_sixes(at, half);
            for (int g = 0; g < 4; g++) out[g][0] = half[g];
        } else {
            Nibbles low, high;
            load_nibbles(at, low, high);
            if constexpr (kSigned) {
                out[0][0] = looked_up(low, table);
                out[1][0] = looked_up(high, table);
            } else {
                out[0][0] = low;
                out[1][0] = high;
            }
        }
        for (size_t i = 0; i < kBytes; i += 64) prefetch_weights(at + i, work);
    }
};

// A sum from its first number on, and to its end: sums of nibbles may be narrower.
inline void begin(Ints& sum, int32_t first) { sum = all_ints(first); }
inline Ints end(Ints sum, int32_t) { return sum; }

// Scales, or minima, of 16 outputs with block b of `blocks_of` inputs, as they lie in tiles.
STREAMSPEC_INLINE Floats factors(const uint16_t* scales, const int8_t* multipliers, size_t super,
                                 size_t block) {
    const Floats scale = load_half(scales + super * kTile);
    return multipliers ? mul(scale, load_bytes(multipliers + block * kTile)) : scale;
}

// Codes of rows, with a scale for each 32 inputs and a sum for each block of the weights.
template <bool EvensFirst>
void quantize_blocks(const Linear& map, const float* x, size_t from, size_t to, const Rows& out) {
    const size_t inputs = map.in_features, parts = kScaled / map.block_size;
    const int offset = map.table || map.bits == 8 ? kWeightOffset : map.offset;
    for (size_t row = from; row < to; row++)
        for (size_t b = 0; b < inputs / kScaled; b++) {
            const float* here = x + row * inputs + b * kScaled;
            const size_t place = b * out.rows + row;
            int8_t* codes = out.codes + place * kScaled;
            const Step step(largest(here, kScaled));
            encode<EvensFirst>(here, kScaled, step.inverse, codes);
            out.scales[place] = step.scale;
            for (size_t part = 0; part < parts; part++) {
                const int32_t sum = sum_of(codes + part * map.block_size, map.block_size);
                const size_t at = (b * parts + part) * out.rows + row;
                out.sums8[at] = -offset * sum;
                out.sums4[at] = static_cast<float>(sum);
            }
        }
}

// Adds products of R rows with Count halves of a tile, from `first` on, to `out`: those of blocks
// from .. to of kScaled inputs. Block inputs share a scale of the weights.
template <int Kind, int Block, int R, int Count>
STREAMSPEC_INLINE void add_stored(const Linear& map, const Rows& x, size_t tile, size_t first,
                                  size_t row, size_t from, size_t to, Floats (*out)[R]) {
    using Codes = Coded<Kind>;
    constexpr int kParts = static_cast<int>(kScaled) / Block;
    constexpr int kSteps = Block / static_cast<int>(Codes::kInputs);
    constexpr std::make_integer_sequence<int, R> kAll{};
    constexpr size_t kBlockBytes = 2 * Codes::kBytes * kSteps * kParts;
    const size_t scaled = map.in_features / kScaled;
    const size_t at = tile * x.blocks * kTile + kLanes * first;
    const size_t super_at =
        map.multipliers ? tile * (map.in_features / kSupers) * kTile + kLanes * first : at;
    const uint8_t* weights = static_cast<const uint8_t*>(map.codes) +
                             (tile * scaled + from) * kBlockBytes + Codes::kBytes * first;
    Bytes table{};
    if constexpr (Kind == 0) table = load_weights(map.table);
    Floats product[Count][R];  // not in `out`, which would be written in every round
    each<Count>([&](auto c) { each<R>([&](auto r) { product[c][r] = out[c][r]; }); });
    for (size_t b = from; b < to; b++, weights += kBlockBytes) {
        const size_t super = map.multipliers ? b / (kSupers / kScaled) : b;
        const size_t rows_at = b * x.rows + row;
        each<Count>([&](auto c) {
            const auto factors_of = [&](const uint16_t* scales, const int8_t* own, size_t block) {
                return factors(scales + super_at + kLanes * c,
                               own ? own + at + kLanes * c : nullptr, super, block);
            };
            Floats total[R];
            each<kParts>([&](auto part) {
                const size_t block = b * kParts + part, sums_at = block * x.rows + row;
                decltype(sum_type<Kind == 4>()) sums[R];
                each<R>([&](auto r) { begin(sums[r], x.sums8[sums_at + r]); });
                each<kSteps>([&](auto step) {
                    constexpr size_t kAt = part * kSteps + step;
                    typename Codes::Weights groups[Codes::kGroups][1];
                    constexpr int kWork = 2 * R * 8 / Codes::kBits;  // scales take as long
                    Codes::load(weights + Codes::kBytes * (2 * kAt + c), table, kWork, groups);
                    add_products(sums, groups, x.codes + rows_at * kScaled + Codes::kInputs * kAt,
                                 kScaled, kAll);
                });
                const Floats scale = factors_of(map.block_scales, map.multipliers, block);
                each<R>([&](auto r) {
                    const Floats sum = to_floats(end(sums[r], x.sums8[sums_at + r]));
                    total[r] = part == 0 ? mul(sum, scale) : fma(sum, scale, total[r]);
                });
                if (map.minima == nullptr) return;
                const Floats least = factors_of(map.minima, map.minimum_multipliers, block);
                each<R>(
                    [&](auto r) { total[r] = fnma(least, all(x.sums4[sums_at + r]), total[r]); });
            });
            each<R>([&](auto r) {
                product[c][r] = fma(total[r], all(x.scales[rows_at + r]), product[c][r]);
            });
        });
    }
    each<Count>([&](auto c) { each<R>([&](auto r) { out[c][r] = product[c][r]; }); });
}

// Of few rows, both halves of a tile at once. Of more, a few blocks of each in turn: sums and
// products of one half fit into registers, and weights are still read about in their order.
template <int Kind, int Block, int R>
void stored_tile(const Linear& map, const Rows& x, size_t tile, size_t row, float* y) {
    constexpr int kHalves = R <= kBothStored ? 2 : 1;
    const size_t scaled = map.in_features / kScaled;
    const size_t span = kHalves == 2 ? scaled : kSupers / kScaled;
    Floats product[2][R];
    each<R>([&](auto r) { product[0][r] = product[1][r] = all(0.0f); });
    for (size_t from = 0; from < scaled; from += span)
        for (size_t half = 0; half < 2; half += kHalves)
            add_stored<Kind, Block, R, kHalves>(map, x, tile, half, row, from,
                                                std::min(from + span, scaled), product + half);
    each<R>([&](auto r) {
        const Floats both[2] = {product[0][r], product[1][r]};
        finish(map, tile, both, y + (row + r) * map.width());
    });
}

template <int Kind, int Block, int... R>
TileProducts stored_products(std::integer_sequence<int, R...>) {
    static constexpr TileProduct kTable[] = {stored_tile<Kind, Block, R + 1>...};
    return {kTable, sizeof...(R)};
}
inline TileProducts stored_products(const Linear& map) {
    constexpr std::make_integer_sequence<int, kRowsStored> kRows{};
    constexpr std::make_integer_sequence<int, kRowsSigned> kSigned{};
    if (map.table) return stored_products<0, 32>(kSigned);
    if (map.bits == 8) return stored_products<8, 32>(kSigned);
    if (map.bits == 6)
        return map.block_size == 16 ? stored_products<6, 16>(kRows) : stored_products<6, 32>(kRows);
    return map.block_size == 16 ? stored_products<4, 16>(kRows) : stored_products<4, 32>(kRows);
}

// The value of input i of an output, before its scale.
inline int stored_code(const Linear& map, size_t tile, size_t output, size_t i) {
    const uint8_t* codes =
        static_cast<const uint8_t*>(map.codes) + tile * map.in_features * kTile / 8 * map.bits;
    if (map.bits == 8) return static_cast<int8_t>(codes[i / 4 * 128 + output * 4 + i % 4]);
    if (map.bits == 6)
        return code6(codes + output / kLanes * kBytes6, output % kLanes, i) + kSixOffset -
               map.offset;
    const int code = codes[i / 8 * 128 + output * 4 + i % 8 / 2] >> i % 2 * 4 & 15;
    return map.table ? map.table[code] : code - map.offset;
}

void look_up_blocks(const Linear& map, size_t id, float* y) {
    const size_t tile = id / kTile, output = id % kTile, half = output / kLanes * kLanes;
    const size_t blocks = map.in_features / map.block_size, at = tile * blocks * kTile + half;
    const size_t super_size = map.multipliers ? kSupers : kScaled;
    const size_t super_at = tile * (map.in_features / super_size) * kTile + half;
    const auto factor = [&](const uint16_t* scales, const int8_t* multipliers, size_t block) {
        float out[kLanes];
        store(out, factors(scales + super_at, multipliers ? multipliers + at : nullptr,
                           block * map.block_size / super_size, block));
        return out[output - half];
    };
    for (size_t block = 0; block < blocks; block++) {
        const float scale = factor(map.block_scales, map.multipliers, block);
        const float least = map.minima ? factor(map.minima, map.minimum_multipliers, block) : 0.0f;
        for (size_t i = block * map.block_size; i < (block + 1) * map.block_size; i++) {
            const float value = static_cast<float>(stored_code(map, tile, output, i)) * scale;
            y[i] = map.minima ? value - least : value;
        }
    }
}

// The functions of the table: of stored blocks, or of other maps.

void quantize_rows(const Linear& map, const float* x, size_t from, size_t to, const Rows& out,
                   float* scratch) {
    if (!map.stored) return quantize(map, x, from, to, out, scratch);
    (map.bits == 4 ? quantize_blocks<true> : quantize_blocks<false>)(map, x, from, to, out);
}

void multiply(const Linear& map, const Rows& x, size_t from, size_t to, float* y) {
    linear(map, map.stored ? stored_products(map) : tile_products(map.bits), x, from, to, y);
}

void look_up_row(const Linear& map, size_t id, float* y) {
    map.stored ? look_up_blocks(map, id, y) : look_up(map, id, y);
}

}  // namespace
}  // namespace streamspec::STREAMSPEC_ISA
