// Linear maps whose weights are the blocks of a file: rows with a scale for each 32 inputs times
// codes of 8, 6 or 4 bits with scales and minima of their own; and rows of such weights as a table.
#pragma once

#include "kernels/linear.inl.h"

// Where a call would pass vectors through memory: GCC 12 makes calls of what many functions use.
#if defined(_MSC_VER) && !defined(__clang__)
#define STREAMSPEC_INLINE __forceinline
#else
#define STREAMSPEC_INLINE inline __attribute__((always_inline))
#endif

namespace streamspec::STREAMSPEC_ISA {
namespace {

constexpr size_t kScaled = 32;          // inputs of a row that share a scale
constexpr size_t kSupers = 256;         // inputs that share a scale of multipliers
constexpr size_t kTableBytes = 4 * 16;  // the same 16 values four times

template <bool Signed>
inline auto code_type() {
    if constexpr (Signed)
        return Bytes{};
    else
        return Nibbles{};
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

    // Of Count halves of a tile.
    template <int Count>
    static STREAMSPEC_INLINE void load(const uint8_t* at, const Bytes& table,
                                       Weights (&out)[kGroups][Count]) {
        for (int c = 0; c < Count; c++) {
            const uint8_t* here = at + kBytes * c;
            if constexpr (kBits == 8) {
                out[0][c] = load_weights(reinterpret_cast<const int8_t*>(here));
            } else if constexpr (kBits == 6) {
                Nibbles half[4];
                load_sixes(here, half);
                for (int g = 0; g < 4; g++) out[g][c] = half[g];
            } else {
                Nibbles low, high;
                load_nibbles(here, low, high);
                if constexpr (kSigned) {
                    out[0][c] = looked_up(low, table);
                    out[1][c] = looked_up(high, table);
                } else {
                    out[0][c] = low;
                    out[1][c] = high;
                }
            }
            for (size_t i = 0; i < kBytes; i += 64) prefetch(here + i + kAhead);
        }
    }
};

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
            int8_t* codes = out.codes + row * out.stride + b * kScaled;
            const Step step(largest(here, kScaled));
            encode<EvensFirst>(here, kScaled, step.inverse, codes);
            out.scales[row * (inputs / kScaled) + b] = step.scale;
            for (size_t part = 0; part < parts; part++) {
                const int32_t sum = sum_of(codes + part * map.block_size, map.block_size);
                const size_t at = row * out.blocks + b * parts + part;
                out.sums8[at] = -offset * sum;
                out.sums4[at] = static_cast<float>(sum);
            }
        }
}

// Products of R rows with halves First .. First + Count of a tile; Block inputs share a scale.
template <int Kind, int Block, int R, int First, int Count>
inline void stored_sums(const Linear& map, const Rows& x, size_t tile, size_t row,
                        Floats (*out)[2]) {
    using Codes = Coded<Kind>;
    constexpr int kParts = static_cast<int>(kScaled) / Block;
    constexpr int kSteps = Block / static_cast<int>(Codes::kInputs);
    constexpr std::make_integer_sequence<int, R * Count> kAll{};
    const size_t scaled = map.in_features / kScaled, stride = x.stride;
    const size_t at = tile * x.blocks * kTile + kLanes * First;
    const size_t super_at =
        map.multipliers ? tile * (map.in_features / kSupers) * kTile + kLanes * First : at;
    const uint8_t* weights = static_cast<const uint8_t*>(map.codes) +
                             2 * tile * (map.in_features / Codes::kInputs) * Codes::kBytes +
                             Codes::kBytes * First;
    const int8_t* inputs = x.codes + row * stride;
    Bytes table{};
    if constexpr (Kind == 0) table = load_weights(map.table);
    each<R>([&](auto r) { each<Count>([&](auto c) { out[r][First + c] = all(0.0f); }); });
    for (size_t b = 0; b < scaled; b++) {
        const size_t super = map.multipliers ? b / (kSupers / kScaled) : b;
        Floats total[R * Count];
        each<kParts>([&](auto part) {
            const size_t block = b * kParts + part;
            Ints sums[R * Count];
            each<R * Count>(
                [&](auto i) { sums[i] = all_ints(x.sums8[(row + i / Count) * x.blocks + block]); });
            each<kSteps>([&](auto) {
                typename Codes::Weights groups[Codes::kGroups][Count];
                Codes::template load<Count>(weights, table, groups);
                add_products(sums, groups, inputs, stride, kAll);
                weights += 2 * Codes::kBytes;
                inputs += Codes::kInputs;
            });
            Floats scale[Count];
            each<Count>([&](auto c) {
                const int8_t* own = map.multipliers ? map.multipliers + at + kLanes * c : nullptr;
                scale[c] = factors(map.block_scales + super_at + kLanes * c, own, super, block);
            });
            each<R * Count>([&](auto i) {
                if constexpr (part == 0)
                    total[i] = mul(to_floats(sums[i]), scale[i % Count]);
                else
                    total[i] = fma(to_floats(sums[i]), scale[i % Count], total[i]);
            });
            if (map.minima == nullptr) return;
            each<Count>([&](auto c) {
                const int8_t* own =
                    map.multipliers ? map.minimum_multipliers + at + kLanes * c : nullptr;
                scale[c] = factors(map.minima + super_at + kLanes * c, own, super, block);
            });
            each<R * Count>([&](auto i) {
                const Floats sum = all(x.sums4[(row + i / Count) * x.blocks + block]);
                total[i] = fnma(scale[i % Count], sum, total[i]);
            });
        });
        each<R>([&](auto r) {
            const Floats scale = all(x.scales[(row + r) * scaled + b]);
            each<Count>([&](auto c) {
                out[r][First + c] = fma(total[r * Count + c], scale, out[r][First + c]);
            });
        });
    }
}

template <int Kind, int Block, int R>
void stored_tile(const Linear& map, const Rows& x, size_t tile, size_t row, float* y) {
    Floats product[R][2];
    if constexpr (R <= kBothStored) {
        stored_sums<Kind, Block, R, 0, 2>(map, x, tile, row, product);
    } else {
        stored_sums<Kind, Block, R, 0, 1>(map, x, tile, row, product);
        stored_sums<Kind, Block, R, 1, 1>(map, x, tile, row, product);
    }
    each<R>([&](auto r) { finish(map, tile, product[r], y + (row + r) * map.width()); });
}

template <int Kind, int Block, int... R>
TileProducts stored_products(std::integer_sequence<int, R...>) {
    static constexpr TileProduct kTable[] = {stored_tile<Kind, Block, R + 1>...};
    return {kTable, sizeof...(R)};
}
inline TileProducts stored_products(const Linear& map) {
    constexpr std::make_integer_sequence<int, kRowsStored> kRows{};
    if (map.table) return stored_products<0, 32>(kRows);
    if (map.bits == 8) return stored_products<8, 32>(kRows);
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
