// Linear maps: quantized rows times tiles of weights of 8, 6 or 4 bits, scaled and activated; and
// rows of such weights as a table.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/quantize.inl.h"

namespace streamspec::STREAMSPEC_ISA {
namespace {

// Writes the results of one row of a tile: products, scaled.
inline void finish(const Linear& map, size_t tile, const Floats (&product)[2], float* y) {
    const size_t at = tile * kTile;
    Floats done[2] = {product[0], product[1]};
    if (map.bias) {
        done[0] = add(done[0], load(map.bias + at));
        done[1] = add(done[1], load(map.bias + at + kLanes));
    }
    if (map.gated) {
        store(y + tile * kLanes, map.limit > 0.0f
                                     ? clamped_swiglu(done[0], done[1], map.alpha, map.limit)
                                     : mul(activated(map.activation, done[0]), done[1]));
        return;
    }
    if (map.activation != Activation::kNone)
        for (Floats& value : done) value = activated(map.activation, value);
    if (at + kTile <= map.out_features) {
        store(y + at, done[0]);
        store(y + at + kLanes, done[1]);
        return;
    }
    float whole[kTile];
    store(whole, done[0]);
    store(whole + kLanes, done[1]);
    std::memcpy(y + at, whole, (map.out_features - at) * sizeof(float));
}

constexpr size_t kBytes8 = 64, kBytes6 = 192;  // of 16 outputs with 4 inputs; with 16

// Products of two groups of four inputs; a set of instructions may add these to each other first.
template <typename Sum, typename Weights>
inline Sum dot_two(Sum sum, Weights first, Weights second, const int8_t* x) {
    return dot(dot(sum, first, x), second, x + 4);
}

// Adds products of N / Count rows with Count halves of a tile to their sums, row by row: of Groups
// groups of four inputs. A fold over all of them: sums that nested lambdas add to stay in memory
// from seven rows on (GCC 12).
template <typename Sum, size_t Groups, size_t Count, typename Weights, size_t N, int... I>
STREAMSPEC_INLINE void add_products(Sum (&sums)[N], const Weights (&weights)[Groups][Count],
                                    const int8_t* x, size_t stride,
                                    std::integer_sequence<int, I...>) {
    const auto with_all = [&](Sum sum, size_t half, const int8_t* of_row) {
        if constexpr (Groups == 1) return dot(sum, weights[0][half], of_row);
        for (size_t g = 0; g + 1 < Groups; g += 2)
            sum = dot_two(sum, weights[g][half], weights[g + 1][half], of_row + 4 * g);
        return sum;
    };
    ((sums[I] = with_all(sums[I], I % Count, x + I / Count * stride)), ...);
}

// Sums of R rows with halves First .. First + Count of a tile, in 8 or 6 bits, unscaled.
template <int Bits, int R, int First, int Count>
inline void integer_sums(const Linear& map, const Rows& x, size_t tile, size_t row,
                         Ints (*out)[2]) {
    constexpr size_t kInputs = Bits == 8 ? 4 : 16, kBytes = Bits == 8 ? kBytes8 : kBytes6;
    constexpr std::make_integer_sequence<int, R * Count> kAll{};
    const size_t steps = round_up(map.in_features, kInputs) / kInputs, stride = x.stride;
    const char* weights =
        static_cast<const char*>(map.codes) + 2 * tile * steps * kBytes + kBytes * First;
    const int8_t* inputs = x.codes + row * stride;
    Ints sums[R * Count];
    each<R * Count>([&](auto i) { sums[i] = all_ints(x.sums8[row + i / Count]); });
    if constexpr (Bits == 8) {
        const auto add = [&](size_t group) {
            Bytes four[1][Count];
            each<Count>([&](auto c) {
                const char* here = weights + 2 * kBytes * group + kBytes * c;
                four[0][c] = load_weights(reinterpret_cast<const int8_t*>(here));
                prefetch_weights(here, R);
            });
            add_products(sums, four, inputs + 4 * group, stride, kAll);
        };
        size_t k = 0;
        for (; k + kGroups8 <= steps;
             k += kGroups8, weights += 2 * kBytes * kGroups8, inputs += 4 * kGroups8)
            each<kGroups8>(add);
        for (; k < steps; k++, weights += 2 * kBytes, inputs += 4) add(0);
    } else {
        for (size_t k = 0; k < steps; k++, weights += 2 * kBytes, inputs += 16) {
            Nibbles groups[4][Count];
            each<Count>([&](auto c) {
                Nibbles half[4];
                load_sixes(reinterpret_cast<const uint8_t*>(weights + kBytes * c), half);
                each<4>([&](auto g) { groups[g][c] = half[g]; });
                for (size_t i = 0; i < kBytes; i += 64)
                    prefetch_weights(weights + kBytes * c + i, R * 8 / Bits);
            });
            add_products(sums, groups, inputs, stride, kAll);
        }
    }
    each<R * Count>([&](auto i) { out[i / Count][First + i % Count] = sums[i]; });
}

template <int Bits, int R>
void integer_tile(const Linear& map, const Rows& x, size_t tile, size_t row, float* y) {
    Ints sums[R][2];
    if constexpr (R <= kBoth8) {
        integer_sums<Bits, R, 0, 2>(map, x, tile, row, sums);
    } else {
        integer_sums<Bits, R, 0, 1>(map, x, tile, row, sums);
        integer_sums<Bits, R, 1, 1>(map, x, tile, row, sums);
    }
    const float* scales = map.scales + tile * kTile;
    const Floats low = load(scales), high = load(scales + kLanes);
    each<R>([&](auto r) {
        const Floats scale = all(x.scales[row + r]);
        const Floats product[2] = {mul(mul(to_floats(sums[r][0]), low), scale),
                                   mul(mul(to_floats(sums[r][1]), high), scale)};
        finish(map, tile, product, y + (row + r) * map.width());
    });
}

inline Floats load_zeros(const uint8_t* p) {
    return load_bytes(reinterpret_cast<const int8_t*>(p));
}

// As `integer_sums`, in 4 bits, scaled block by block.
template <int R, int First, int Count>
inline void block_sums(const Linear& map, const Rows& x, size_t tile, size_t row,
                       Floats (*out)[2]) {
    const size_t blocks = x.blocks, steps = map.block_size / 8, stride = x.stride;
    const uint8_t* weights =
        static_cast<const uint8_t*>(map.codes) + tile * (map.in_features / 8) * 128 + 64 * First;
    const size_t at = tile * blocks * kTile + kLanes * First;
    const uint16_t* scales = map.block_scales + at;
    const uint8_t* zeros = map.zero_points ? map.zero_points + at : nullptr;
    const int8_t* inputs = x.codes + row * stride;
    constexpr std::make_integer_sequence<int, R * Count> kAll{};
    each<R>([&](auto r) { each<Count>([&](auto c) { out[r][First + c] = all(0.0f); }); });
    for (size_t b = 0; b < blocks; b++) {
        Ints sums[R * Count];
        each<R * Count>([&](auto i) { sums[i] = all_ints(0); });
        for (size_t k = 0; k < steps;
             k += kGroups4, weights += 128 * kGroups4, inputs += 8 * kGroups4)
            each<kGroups4>([&](auto g) {
                Nibbles halves[2][Count];
                each<Count>([&](auto c) {
                    load_nibbles(weights + 128 * g + 64 * c, halves[0][c], halves[1][c]);
                    prefetch_weights(weights + 128 * g + 64 * c, 2 * R);
                });
                add_products(sums, halves, inputs + 8 * g, stride, kAll);
            });
        Floats scale[Count], zero[Count];
        each<Count>([&](auto c) {
            scale[c] = load_half(scales + b * kTile + kLanes * c);
            zero[c] = zeros ? load_zeros(zeros + b * kTile + kLanes * c) : all(8.0f);
        });
        each<R>([&](auto r) {
            const Floats sum = all(x.sums4[(row + r) * blocks + b]);
            each<Count>([&](auto c) {  // whole numbers up to the last product
                out[r][First + c] = fma(fnma(zero[c], sum, to_floats(sums[r * Count + c])),
                                        scale[c], out[r][First + c]);
            });
        });
    }
    each<R>([&](auto r) {
        const Floats scale = all(x.scales[row + r]);
        each<Count>([&](auto c) { out[r][First + c] = mul(out[r][First + c], scale); });
    });
}

template <int R>
void block_tile(const Linear& map, const Rows& x, size_t tile, size_t row, float* y) {
    Floats product[R][2];
    if constexpr (R <= kBoth4) {
        block_sums<R, 0, 2>(map, x, tile, row, product);
    } else {
        block_sums<R, 0, 1>(map, x, tile, row, product);
        block_sums<R, 1, 1>(map, x, tile, row, product);
    }
    each<R>([&](auto r) { finish(map, tile, product[r], y + (row + r) * map.width()); });
}

// Products of a tile of weights with 1, 2, .. rows: a function each.
using TileProduct = void (*)(const Linear&, const Rows&, size_t tile, size_t row, float* y);
struct TileProducts {
    const TileProduct* of_rows;
    size_t max_rows;
};

template <int Bits, int R>
constexpr TileProduct tile_product() {
    if constexpr (Bits == 4)
        return block_tile<R>;
    else
        return integer_tile<Bits, R>;
}
template <int Bits, int... R>
TileProducts tile_products(std::integer_sequence<int, R...>) {
    static constexpr TileProduct kTable[] = {tile_product<Bits, R + 1>()...};
    return {kTable, sizeof...(R)};
}
inline TileProducts tile_products(int bits) {
    if (bits == 8) return tile_products<8>(std::make_integer_sequence<int, kRows8>());
    if (bits == 6) return tile_products<6>(std::make_integer_sequence<int, kRows6>());
    return tile_products<4>(std::make_integer_sequence<int, kRows4>());
}

inline void linear(const Linear& map, const TileProducts& products, const Rows& x, size_t from,
                   size_t to, float* y) {
    const size_t passes = (x.rows + products.max_rows - 1) / products.max_rows;
    const size_t height = (x.rows + passes - 1) / passes;
    for (size_t tile = from; tile < to; tile++)
        for (size_t row = 0; row < x.rows; row += height)
            products.of_rows[std::min(height, x.rows - row) - 1](map, x, tile, row, y);
}

// Code of input i of an output, in 6 bits; `codes`: of its half of a tile, where it is `lane`.
inline int code6(const uint8_t* codes, size_t lane, size_t i) {
    const uint8_t* at = codes + i / 16 * 2 * kBytes6 + 4 * lane + i % 4;
    const size_t group = i % 16 / 4;
    return ((at[group / 2 * 64] >> group % 2 * 4 & 15) | (at[128] >> group * 2 & 3) << 4) -
           kSixOffset;
}

inline void look_up(const Linear& map, size_t id, float* y) {
    const size_t tile = id / kTile, output = id % kTile;
    const float scale = map.scales[id];
    if (map.bits == 8) {
        const int8_t* codes = static_cast<const int8_t*>(map.codes) +
                              tile * round_up(map.in_features, 4) * kTile + output * 4;
        for (size_t i = 0; i < map.in_features; i++)
            y[i] = static_cast<float>(codes[i / 4 * 128 + i % 4]) * scale;
    } else {
        const uint8_t* codes = static_cast<const uint8_t*>(map.codes) +
                               tile * round_up(map.in_features, 16) / 16 * 2 * kBytes6;
        codes += output / kLanes * kBytes6;
        for (size_t i = 0; i < map.in_features; i++)
            y[i] = static_cast<float>(code6(codes, output % kLanes, i)) * scale;
    }
    if (map.mix) mix_row(y, map.in_features, map.mix);
}

}  // namespace
}  // namespace streamspec::STREAMSPEC_ISA
