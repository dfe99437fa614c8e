// 16 lanes in four registers: NEON of 64-bit ARM; with its dot products where STREAMSPEC_DOTPROD
// is 1.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace streamspec::STREAMSPEC_ISA {

constexpr int kRows8 = 4, kRows6 = 4, kRows4 = 4;  // rows of a pass over a tile of weights
constexpr int
    kBoth8 = 2,
    kBoth4 = 1;  // up to this many rows, both halves of a tile at once: else 32 registers are few
constexpr int kGroups8 = 1, kGroups4 = 1;  // of 4 and 8 inputs in a round of the loop
constexpr int kRowsStored = 4, kRowsSigned = 4,
              kBothStored = 1;  // the same of stored blocks, codes unsigned or signed
constexpr int kQueries = 4;     // of attention, at a time
constexpr int kFewQueries = 8;  // up to which keys are not transposed
constexpr int kAhead = 512;     // bytes that are prefetched ahead

struct Floats {
    float32x4_t of[4];
};
struct Ints {
    int32x4_t of[4];
};
struct Bytes {
    int8x16_t of[4];
};
using Nibbles = Bytes;
using NibbleSum = Ints;  // of products of nibbles 0..15 with 32 inputs

template <typename Out, typename Body>
inline Out quarters(const Body& body) {
    return Out{{body(0), body(1), body(2), body(3)}};
}

inline Floats load(const float* p) {
    return quarters<Floats>([=](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, Floats x) {
    vst1q_f32(p, x.of[0]);
    vst1q_f32(p + 4, x.of[1]);
    vst1q_f32(p + 8, x.of[2]);
    vst1q_f32(p + 12, x.of[3]);
}
inline Floats load_half(const uint16_t* p) {
    return quarters<Floats>(
        [=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline void store_half(uint16_t* p, Floats x) {
    for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.of[i])));
}
inline Floats all(float x) {
    const float32x4_t each = vdupq_n_f32(x);
    return {{each, each, each, each}};
}
inline Ints all_ints(int32_t x) {
    const int32x4_t each = vdupq_n_s32(x);
    return {{each, each, each, each}};
}
inline Floats add(Floats a, Floats b) {
    return quarters<Floats>([&](int i) { return vaddq_f32(a.of[i], b.of[i]); });
}
inline Floats sub(Floats a, Floats b) {
    return quarters<Floats>([&](int i) { return vsubq_f32(a.of[i], b.of[i]); });
}
inline Floats mul(Floats a, Floats b) {
    return quarters<Floats>([&](int i) { return vmulq_f32(a.of[i], b.of[i]); });
}
inline Floats div(Floats a, Floats b) {
    return quarters<Floats>([&](int i) { return vdivq_f32(a.of[i], b.of[i]); });
}
inline Floats fma(Floats a, Floats b, Floats c) {  // a b + c
    return quarters<Floats>([&](int i) { return vfmaq_f32(c.of[i], a.of[i], b.of[i]); });
}
inline Floats fnma(Floats a, Floats b, Floats c) {  // c - a b
    return quarters<Floats>([&](int i) { return vfmsq_f32(c.of[i], a.of[i], b.of[i]); });
}
// By comparison: as on x86, b where one is no number, or both are zero.
inline Floats max(Floats a, Floats b) {
    return quarters<Floats>(
        [&](int i) { return vbslq_f32(vcgtq_f32(a.of[i], b.of[i]), a.of[i], b.of[i]); });
}
inline Floats min(Floats a, Floats b) {
    return quarters<Floats>(
        [&](int i) { return vbslq_f32(vcltq_f32(a.of[i], b.of[i]), a.of[i], b.of[i]); });
}
inline Floats larger(Floats a,
                     Floats b) {  // of magnitudes; what is no number is larger than all that are
    return quarters<Floats>([&](int i) {
        return vreinterpretq_f32_s32(
            vmaxq_s32(vreinterpretq_s32_f32(a.of[i]), vreinterpretq_s32_f32(b.of[i])));
    });
}
inline Floats absolute(Floats a) {
    return quarters<Floats>([&](int i) { return vabsq_f32(a.of[i]); });
}
inline Floats to_floats(Ints a) {
    return quarters<Floats>([&](int i) { return vcvtq_f32_s32(a.of[i]); });
}
inline Ints nearest(Floats a) {
    return quarters<Ints>([&](int i) { return vcvtnq_s32_f32(a.of[i]); });
}  // ties to even
inline Floats power_of_two(Ints n) {  // 2^n, -126 <= n <= 127
    return quarters<Floats>([&](int i) {
        return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.of[i], vdupq_n_s32(127)), 23));
    });
}
inline void store_bytes(int8_t* p, Ints a) {  // of -128..127
    const int16x8_t low = vcombine_s16(vqmovn_s32(a.of[0]), vqmovn_s32(a.of[1]));
    const int16x8_t high = vcombine_s16(vqmovn_s32(a.of[2]), vqmovn_s32(a.of[3]));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
inline Ints evens_first(Ints a) {  // of eight neighbours 0 2 4 6 1 3 5 7
    return {{vuzp1q_s32(a.of[0], a.of[1]), vuzp2q_s32(a.of[0], a.of[1]),
             vuzp1q_s32(a.of[2], a.of[3]), vuzp2q_s32(a.of[2], a.of[3])}};
}
inline Floats load_bytes(const int8_t* p) {
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
             vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}

inline Bytes load_weights(const int8_t* p) {
    return quarters<Bytes>([=](int i) { return vld1q_s8(p + 16 * i); });
}
constexpr int kWeightOffset = 0;
inline void load_nibbles(const uint8_t* p, Nibbles& low, Nibbles& high) {
    low = quarters<Nibbles>(
        [=](int i) { return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(p + 16 * i), vdupq_n_u8(15))); });
    high = quarters<Nibbles>(
        [=](int i) { return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(p + 16 * i), 4)); });
}
// The bytes that `codes` 0..15 choose of a table of 16, which each quarter of a register holds.
inline Bytes looked_up(Nibbles codes, Bytes table) {
    return quarters<Bytes>(
        [&](int i) { return vqtbl1q_s8(table.of[i], vreinterpretq_u8_s8(codes.of[i])); });
}
// Codes of four groups of four inputs, 0..63.
inline void load_sixes(const uint8_t* p, Nibbles (&out)[4]) {
    const uint8x16_t two = vdupq_n_u8(0x30);
    for (int i = 0; i < 4; i++) {
        const uint8x16_t first = vld1q_u8(p + 16 * i), second = vld1q_u8(p + 64 + 16 * i),
                         high = vld1q_u8(p + 128 + 16 * i);
        const auto joined = [&](uint8x16_t low, uint8x16_t top) {
            return vreinterpretq_s8_u8(vorrq_u8(low, vandq_u8(top, two)));
        };
        out[0].of[i] = joined(vandq_u8(first, vdupq_n_u8(15)), vshlq_n_u8(high, 4));
        out[1].of[i] = joined(vshrq_n_u8(first, 4), vshlq_n_u8(high, 2));
        out[2].of[i] = joined(vandq_u8(second, vdupq_n_u8(15)), high);
        out[3].of[i] = joined(vshrq_n_u8(second, 4), vshrq_n_u8(high, 2));
    }
}
inline int32x4_t dot(int32x4_t sum, int8x16_t weights, int8x16_t codes) {
#if STREAMSPEC_DOTPROD
    return vdotq_s32(sum, weights, codes);
#else
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(weights), vget_low_s8(codes)));
    const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(weights), vget_high_s8(codes)));
    return vaddq_s32(sum, vpaddq_s32(low, high));
#endif
}
// Adds to each lane the products of its four weights and the four signed bytes at x.
inline Ints dot(Ints sum, Bytes weights, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    const int8x16_t codes = vreinterpretq_s8_s32(vdupq_n_s32(four));
    return quarters<Ints>([&](int i) { return dot(sum.of[i], weights.of[i], codes); });
}
inline void prefetch(const void* p) {
#if defined(_MSC_VER) && !defined(__clang__)
    __prefetch(p);
#else
    __builtin_prefetch(p);
#endif
}
inline void prefetch_weights(const void* p, int) { prefetch(static_cast<const char*>(p) + kAhead); }
inline Floats zero_where_less(Floats x, Floats limit, Floats y) {  // y, 0 in lanes where x < limit
    return quarters<Floats>([&](int i) {
        return vreinterpretq_f32_u32(
            vbicq_u32(vreinterpretq_u32_f32(y.of[i]), vcltq_f32(x.of[i], limit.of[i])));
    });
}
template <int Distance>  // lane i of the result is lane i ^ Distance of x
inline Floats swapped(Floats x) {
    if constexpr (Distance == 1)
        return quarters<Floats>([&](int i) { return vrev64q_f32(x.of[i]); });
    if constexpr (Distance == 2)
        return quarters<Floats>([&](int i) { return vextq_f32(x.of[i], x.of[i], 2); });
    return quarters<Floats>([&](int i) { return x.of[i ^ Distance / 4]; });
}
// Transposes in[16], rows of 16 floats, into out[16][16].
inline void transpose(const Floats* in, float* out) {
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            const Floats* r = in + 4 * i;
            const float32x4x2_t ab = vtrnq_f32(r[0].of[j], r[1].of[j]),
                                cd = vtrnq_f32(r[2].of[j], r[3].of[j]);
            float* to = out + 64 * j + 4 * i;
            vst1q_f32(to, vcombine_f32(vget_low_f32(ab.val[0]), vget_low_f32(cd.val[0])));
            vst1q_f32(to + 16, vcombine_f32(vget_low_f32(ab.val[1]), vget_low_f32(cd.val[1])));
            vst1q_f32(to + 32, vcombine_f32(vget_high_f32(ab.val[0]), vget_high_f32(cd.val[0])));
            vst1q_f32(to + 48, vcombine_f32(vget_high_f32(ab.val[1]), vget_high_f32(cd.val[1])));
        }
}
// Lane i of the result: the sum of in[i], in pairs of lanes whose distance is 8, 4, 1 and 2.
inline Floats sums_across(const Floats* in) {
    const auto four = [](const Floats& a) {
        return vaddq_f32(vaddq_f32(a.of[0], a.of[2]), vaddq_f32(a.of[1], a.of[3]));
    };
    return quarters<Floats>([&](int i) {
        const Floats* a = in + 4 * i;
        return vpaddq_f32(vpaddq_f32(four(a[0]), four(a[1])), vpaddq_f32(four(a[2]), four(a[3])));
    });
}

}  // namespace streamspec::STREAMSPEC_ISA
