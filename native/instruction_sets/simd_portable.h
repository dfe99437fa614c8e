// 16 lanes in plain C++: for processors without kernels of their own, and to compare the others
// with.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace streamspec::STREAMSPEC_ISA {

constexpr int kRows8 = 2, kRows6 = 2, kRows4 = 2;  // rows of a pass over a tile of weights
constexpr int kBoth8 = 2,
              kBoth4 = 2;  // rows up to which both halves of a tile are computed at once
constexpr int kGroups8 = 1, kGroups4 = 1;  // of 4 and 8 inputs in a round of the loop
constexpr int kRowsStored = 2, kRowsSigned = 2,
              kBothStored = 2;  // the same of stored blocks, codes unsigned or signed
constexpr int kQueries = 2;     // of attention, at a time
constexpr int kFewQueries = 8;  // up to which keys are not transposed
constexpr int kAhead = 1024;    // bytes that are prefetched ahead

struct Floats {
    float of[16];
};
struct Ints {
    int32_t of[16];
};
struct Bytes {
    int8_t of[64];
};
using Nibbles = Bytes;
using NibbleSum = Ints;  // of products of nibbles 0..15 with 32 inputs

template <typename Out, typename Body>
inline Out lanes(const Body& body) {
    Out out;
    for (int i = 0; i < 16; i++) out.of[i] = body(i);
    return out;
}

// float16 to float32 and back, as IEEE 754 has it: ties to even, what is too large is infinite.
inline float widened(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
    float out;
    if (rest >= 0x7c00) {  // infinite, or no number
        const uint32_t bits =
            sign | 0x7f800000 | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 0x400000 : 0);
        std::memcpy(&out, &bits, 4);
    } else if (rest < 0x400) {  // subnormal
        out = static_cast<float>(rest) * 5.9604644775390625e-8f;
        if (sign) out = -out;
    } else {
        const uint32_t bits = sign | ((rest << 13) + 0x38000000);
        std::memcpy(&out, &bits, 4);
    }
    return out;
}
inline uint16_t narrowed(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);
    if (rest < 0x38800000) {  // subnormal: multiples of 2^-24
        float magnitude;
        std::memcpy(&magnitude, &rest, 4);
        return static_cast<uint16_t>(
            sign | static_cast<uint32_t>(std::nearbyint(magnitude * 16777216.0f)));
    }
    return static_cast<uint16_t>(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}

inline Floats load(const float* p) {
    Floats out;
    std::memcpy(out.of, p, sizeof out);
    return out;
}
inline void store(float* p, Floats x) { std::memcpy(p, x.of, sizeof x); }
inline Floats load_half(const uint16_t* p) {
    return lanes<Floats>([=](int i) { return widened(p[i]); });
}
inline void store_half(uint16_t* p, Floats x) {
    for (int i = 0; i < 16; i++) p[i] = narrowed(x.of[i]);
}
inline Floats all(float x) {
    return lanes<Floats>([=](int) { return x; });
}
inline Ints all_ints(int32_t x) {
    return lanes<Ints>([=](int) { return x; });
}
inline Floats add(Floats a, Floats b) {
    return lanes<Floats>([&](int i) { return a.of[i] + b.of[i]; });
}
inline Floats sub(Floats a, Floats b) {
    return lanes<Floats>([&](int i) { return a.of[i] - b.of[i]; });
}
inline Floats mul(Floats a, Floats b) {
    return lanes<Floats>([&](int i) { return a.of[i] * b.of[i]; });
}
inline Floats div(Floats a, Floats b) {
    return lanes<Floats>([&](int i) { return a.of[i] / b.of[i]; });
}
inline Floats fma(Floats a, Floats b, Floats c) {  // a b + c
    return lanes<Floats>([&](int i) { return std::fma(a.of[i], b.of[i], c.of[i]); });
}
inline Floats fnma(Floats a, Floats b, Floats c) {  // c - a b
    return lanes<Floats>([&](int i) { return std::fma(-a.of[i], b.of[i], c.of[i]); });
}
inline Floats max(Floats a, Floats b) {
    return lanes<Floats>([&](int i) { return a.of[i] > b.of[i] ? a.of[i] : b.of[i]; });
}
inline Floats min(Floats a, Floats b) {
    return lanes<Floats>([&](int i) { return a.of[i] < b.of[i] ? a.of[i] : b.of[i]; });
}
inline Floats larger(Floats a,
                     Floats b) {  // of magnitudes; what is no number is larger than all that are
    return lanes<Floats>(
        [&](int i) { return std::isnan(a.of[i]) || a.of[i] > b.of[i] ? a.of[i] : b.of[i]; });
}
inline Floats absolute(Floats a) {
    return lanes<Floats>([&](int i) { return std::fabs(a.of[i]); });
}
inline Floats to_floats(Ints a) {
    return lanes<Floats>([&](int i) { return static_cast<float>(a.of[i]); });
}
inline Ints nearest(Floats a) {  // ties to even
    return lanes<Ints>([&](int i) {
        const float x = a.of[i];
        return x > -2147483648.0f && x < 2147483648.0f ? static_cast<int32_t>(std::nearbyint(x))
                                                       : INT32_MIN;
    });
}
inline Floats power_of_two(Ints n) {  // 2^n, -126 <= n <= 127
    return lanes<Floats>([&](int i) {
        const uint32_t bits = (static_cast<uint32_t>(n.of[i]) + 127) << 23;
        float out;
        std::memcpy(&out, &bits, 4);
        return out;
    });
}
inline void store_bytes(int8_t* p, Ints a) {  // of -128..127
    for (int i = 0; i < 16; i++)
        p[i] = static_cast<int8_t>(a.of[i] < -128 ? -128 : a.of[i] > 127 ? 127 : a.of[i]);
}
inline Ints evens_first(Ints a) {  // of eight neighbours 0 2 4 6 1 3 5 7
    return lanes<Ints>([&](int i) { return a.of[i / 8 * 8 + 2 * (i % 4) + i / 4 % 2]; });
}
inline Floats load_bytes(const int8_t* p) {
    return lanes<Floats>([=](int i) { return static_cast<float>(p[i]); });
}

inline Bytes load_weights(const int8_t* p) {
    Bytes out;
    std::memcpy(out.of, p, sizeof out);
    return out;
}
constexpr int kWeightOffset = 0;
inline void load_nibbles(const uint8_t* p, Nibbles& low, Nibbles& high) {
    for (int i = 0; i < 64; i++) {
        low.of[i] = static_cast<int8_t>(p[i] & 15);
        high.of[i] = static_cast<int8_t>(p[i] >> 4);
    }
}
// The bytes that `codes` 0..15 choose of a table of 16, which each quarter of a register holds.
inline Bytes looked_up(const Nibbles& codes, const Bytes& table) {
    Bytes out;
    for (int i = 0; i < 64; i++) out.of[i] = table.of[codes.of[i]];
    return out;
}
// Codes of four groups of four inputs, 0..63.
inline void load_sixes(const uint8_t* p, Nibbles (&out)[4]) {
    for (int g = 0; g < 4; g++)
        for (int i = 0; i < 64; i++)
            out[g].of[i] = static_cast<int8_t>((p[g / 2 * 64 + i] >> g % 2 * 4 & 15) |
                                               (p[128 + i] >> 2 * g & 3) << 4);
}
// Adds to each lane the products of its four weights and the four signed bytes at x.
inline Ints dot(Ints sum, const Bytes& weights, const int8_t* x) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 4; j++) sum.of[i] += weights.of[4 * i + j] * x[j];
    return sum;
}
inline void prefetch(const void*) {}
inline void prefetch_weights(const void*, int) {}
inline Floats zero_where_less(Floats x, Floats limit, Floats y) {  // y, 0 in lanes where x < limit
    return lanes<Floats>([&](int i) { return x.of[i] < limit.of[i] ? 0.0f : y.of[i]; });
}
template <int Distance>  // lane i of the result is lane i ^ Distance of x
inline Floats swapped(Floats x) {
    return lanes<Floats>([&](int i) { return x.of[i ^ Distance]; });
}
// Transposes in[16], rows of 16 floats, into out[16][16].
inline void transpose(const Floats* in, float* out) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) out[16 * j + i] = in[i].of[j];
}
// Lane i of the result: the sum of in[i], in pairs of lanes whose distance is 8, 4, 1 and 2.
inline Floats sums_across(const Floats* in) {
    return lanes<Floats>([&](int i) {
        float four[4];
        for (int j = 0; j < 4; j++)
            four[j] = (in[i].of[j] + in[i].of[j + 8]) + (in[i].of[j + 4] + in[i].of[j + 12]);
        return (four[0] + four[1]) + (four[2] + four[3]);
    });
}

}  // namespace streamspec::STREAMSPEC_ISA
