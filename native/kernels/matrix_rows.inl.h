// Linear maps of 8 and 6 bits by AMX, of many rows: one instruction multiplies the codes of 16 rows
// with those of 16 outputs, over 64 inputs. The sums are whole numbers and the rest is that of
// linear.inl.h, so that rows get the bits that they get there.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/linear.inl.h"

namespace streamspec::STREAMSPEC_ISA {
namespace {

constexpr size_t kMatrixRows = 16, kMatrixInputs = 64;  // of codes in a register
constexpr size_t kMatrixBytes = kMatrixRows * kMatrixInputs;
constexpr size_t kFewestRows = 5;  // below these, weights are waited for in any case

// What lies at p is read or written where the compiler does not see it.
inline void touched(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

// Shapes of this thread's registers: 0 to 3 are sums [rows, 16], 4 and 5 codes [rows, 64], 6 and 7
// weights [64 / 4, 16, 4].
class Shapes {
  public:
    explicit Shapes(size_t rows) {
        struct alignas(64) {
            uint8_t palette, start, reserved[14];
            uint16_t bytes[16];
            uint8_t rows[16];
        } shapes{};
        shapes.palette = 1;
        for (int i = 0; i < 8; i++) {
            shapes.bytes[i] = 64;
            shapes.rows[i] = static_cast<uint8_t>(i < 6 ? rows : kMatrixRows);
        }
        touched(&shapes);
        _tile_loadconfig(&shapes);
    }
    Shapes(const Shapes&) = delete;
    ~Shapes() { _tile_release(); }
};

// Up to 64 inputs of a tile of weights, as signed bytes [64 / 4, 2, 16, 4], 0 from `inputs` on.
template <int Bits>
inline void signed_codes(const uint8_t* weights, size_t inputs, int8_t* out) {
    if (inputs < kMatrixInputs) std::memset(out, 0, 2 * kMatrixBytes);
    if constexpr (Bits == 8) {
        std::memcpy(out, weights, inputs * kTile);
    } else {
        for (size_t i = 0; i < inputs; i += 16, out += 8 * kBytes8)
            for (size_t half = 0; half < 2; half++, weights += kBytes6) {
                Nibbles groups[4];
                load_sixes(weights, groups);
                for (size_t g = 0; g < 4; g++)
                    _mm512_storeu_si512(out + (2 * g + half) * kBytes8,
                                        _mm512_sub_epi8(groups[g], _mm512_set1_epi8(kSixOffset)));
            }
    }
    touched(out);
}

// Sums of rows at `codes`, and of as many at `others` if any, with a tile: [2, half, row, 16].
template <int Bits>
void matrix_sums(const Linear& map, size_t tile, const int8_t* codes, const int8_t* others,
                 size_t stride, bool ahead, int32_t (*sums)[kLanes * kMatrixRows]) {
    constexpr size_t kInputs = Bits == 8 ? 4 : 16, kBytes = Bits == 8 ? kBytes8 : kBytes6;
    const size_t inputs = round_up(map.in_features, kInputs);
    const uint8_t* weights =
        static_cast<const uint8_t*>(map.codes) + tile * inputs / kInputs * 2 * kBytes;
    alignas(64) int8_t decoded[2 * kMatrixBytes];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t i = 0; i < inputs; i += kMatrixInputs) {
        const size_t count = std::min(kMatrixInputs, inputs - i), bytes = count / kInputs * kBytes;
        const uint8_t* here = weights + i / kInputs * 2 * kBytes;
        for (size_t at = 0; ahead && at < 2 * bytes; at += 64) prefetch_weights(here + at, kRows8);
        const int8_t* both = reinterpret_cast<const int8_t*>(here);
        if (Bits != 8 || count < kMatrixInputs) {
            signed_codes<Bits>(here, count, decoded);
            both = decoded;
        }
        _tile_loadd(6, both, 2 * kBytes8);
        _tile_loadd(7, both + kBytes8, 2 * kBytes8);
        _tile_loadd(4, codes + i, stride);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        if (others == nullptr) continue;
        _tile_loadd(5, others + i, stride);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    touched(sums);
}

// As `linear`. Rows go in groups of one height, of which the last may begin within the one before
// it: such rows are computed twice.
template <int Bits>
void matrix_linear(const Linear& map, const Rows& x, size_t from, size_t to, float* y) {
    const size_t groups = (x.rows + kMatrixRows - 1) / kMatrixRows;
    const size_t height = (x.rows + groups - 1) / groups;
    const auto first = [&](size_t group) { return std::min(group * height, x.rows - height); };
    const auto codes = [&](size_t group) { return x.codes + first(group) * x.stride; };
    const Shapes shapes(height);
    alignas(64) int32_t sums[4][kLanes * kMatrixRows];
    for (size_t tile = from; tile < to; tile++) {
        const Floats low = load(map.scales + tile * kTile);
        const Floats high = load(map.scales + tile * kTile + kLanes);
        const auto scaled = [&](const int32_t* sum, Floats by, Floats scale) {
            return mul(mul(to_floats(_mm512_load_si512(sum)), by), scale);
        };
        for (size_t group = 0; group < groups; group += 2) {
            const size_t count = std::min<size_t>(2, groups - group);
            matrix_sums<Bits>(map, tile, codes(group), count == 2 ? codes(group + 1) : nullptr,
                              x.stride, group == 0, sums);
            for (size_t g = 0; g < count; g++)
                for (size_t r = 0; r < height; r++) {
                    const size_t row = first(group + g) + r;
                    const Floats scale = all(x.scales[row]);
                    const Floats product[2] = {scaled(sums[2 * g] + kLanes * r, low, scale),
                                               scaled(sums[2 * g + 1] + kLanes * r, high, scale)};
                    finish(map, tile, product, y + row * map.width());
                }
        }
    }
}

}  // namespace
}  // namespace streamspec::STREAMSPEC_ISA
