// Rows of float32 as int8 codes, with a scale each.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "kernels/lane_math.inl.h"

namespace streamspec::STREAMSPEC_ISA {
namespace {

// The largest magnitude; infinite or no number where one of them is.
inline float largest(const float* x, size_t width) {
    Floats maxima = all(0.0f);
    for (size_t i = 0; i < width; i += kLanes) maxima = larger(maxima, absolute(load(x + i)));
    return across<larger>(maxima);
}

// A step of codes -127..127, and its inverse: 0 where it would not be finite, for all codes to be 0
// then.
struct Step {
    float scale, inverse;
    explicit Step(float magnitude)
        : scale(magnitude * (1.0f / 127.0f)),
          inverse(scale >= FLT_MIN && scale <= FLT_MAX ? 1.0f / scale : 0.0f) {
        if (!(scale <= FLT_MAX)) scale = NAN;
    }
};

constexpr int kSixOffset = 32;  // of codes in 6 bits

// Codes of `width` numbers, a multiple of 16. `EvensFirst`: those of eight numbers as 0 2
// 4 6 1 3 5 7.
template <bool EvensFirst>
inline void encode(const float* x, size_t width, float inverse, int8_t* codes) {
    if (inverse == 0.0f) {
        std::memset(codes, 0, width);
        return;
    }
    const Floats factor = all(inverse);
    for (size_t i = 0; i < width; i += kLanes) {
        const Ints values = nearest(mul(load(x + i), factor));
        store_bytes(codes + i, EvensFirst ? evens_first(values) : values);
    }
}

inline int32_t sum_of(const int8_t* codes, size_t count) {
    int32_t sum = 0;
    for (size_t i = 0; i < count; i++) sum += codes[i];
    return sum;
}

inline void quantize(const Linear& map, const float* x, size_t from, size_t to, const Rows& out,
                     float* scratch) {
    const size_t inputs = map.in_features, padded = round_up(inputs, kRowAlign);
    for (size_t row = from; row < to; row++) {
        std::memcpy(scratch, x + row * inputs, inputs * sizeof(float));
        std::fill(scratch + inputs, scratch + padded, 0.0f);
        if (map.mix) mix_row(scratch, inputs, map.mix);
        int8_t* codes = out.codes + row * out.stride;
        const Step step(largest(scratch, padded));
        out.scales[row] = step.scale;
        if (map.bits != 4) {
            encode<false>(scratch, padded, step.inverse, codes);
            out.sums8[row] = -(map.bits == 8 ? kWeightOffset : kSixOffset) * sum_of(codes, padded);
            continue;
        }
        encode<true>(scratch, padded, step.inverse, codes);
        for (size_t b = 0; b < out.blocks; b++)
            out.sums4[row * out.blocks + b] =
                static_cast<float>(sum_of(codes + b * map.block_size, map.block_size));
    }
}

}  // namespace
}  // namespace streamspec::STREAMSPEC_ISA
