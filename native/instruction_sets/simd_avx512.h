// 16 lanes in one register: AVX-512 with VNNI.
#pragma once

// GCC warns of its own intrinsics, which leave lanes undefined on purpose (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include <cstdint>
#include <cstring>

#include "kernels/kernels.h"

namespace streamspec::STREAMSPEC_ISA {

constexpr int kRows8 = 8, kRows6 = 8, kRows4 = 6;  // rows of a pass over a tile of weights
constexpr int kBoth8 = 8,
              kBoth4 = 6;  // rows up to which both halves of a tile are computed at once
constexpr int kGroups8 = 4,
              kGroups4 =
                  4;  // of 4 and 8 inputs in a round of the loop, in which compilers copy all sums
constexpr int kRowsStored = 12, kRowsSigned = 12,
              kBothStored = 4;  // the same of stored blocks, codes unsigned or signed
constexpr int kQueries = 6;     // of attention, at a time
constexpr int kFewQueries = 8;  // up to which keys are not transposed
constexpr int kAhead = 8192;    // bytes that are prefetched ahead: over the border of a page

using Floats = __m512;
using Ints = __m512i;
using Bytes = __m512i;
using Nibbles = __m512i;
using NibbleSum = Ints;  // of products of nibbles 0..15 with 32 inputs

inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_half(uint16_t* p, Floats x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Ints all_ints(int32_t x) { return _mm512_set1_epi32(x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats larger(Floats a,
                     Floats b) {  // of magnitudes; what is no number is larger than all that are
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
inline Floats absolute(Floats a) { return _mm512_abs_ps(a); }
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Ints nearest(Floats a) { return _mm512_cvtps_epi32(a); }  // ties to even
inline Floats power_of_two(Ints n) {                             // 2^n, -126 <= n <= 127
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
inline void store_bytes(int8_t* p, Ints a) {  // of -128..127
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a));
}
inline Ints evens_first(Ints a) {  // of eight neighbours 0 2 4 6 1 3 5 7
    return _mm512_permutexvar_epi32(
        _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15), a);
}
inline Floats load_bytes(const int8_t* p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// A weight for `dot`: unsigned, so 128 is added to signed ones.
inline Bytes load_weights(const int8_t* p) {
    return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(static_cast<char>(0x80)));
}
constexpr int kWeightOffset = 128;
inline void load_nibbles(const uint8_t* p, Nibbles& low, Nibbles& high) {
    const Bytes both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
    low = _mm512_and_si512(both, mask);
    high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
}
// The bytes that `codes` 0..15 choose of a table of 16, which each quarter of a register holds.
inline Bytes looked_up(Nibbles codes, Bytes table) { return _mm512_shuffle_epi8(table, codes); }
// Codes of four groups of four inputs, 0..63.
inline void load_sixes(const uint8_t* p, Nibbles (&out)[4]) {
    const Bytes first = _mm512_loadu_si512(p), second = _mm512_loadu_si512(p + 64),
                high = _mm512_loadu_si512(p + 128);
    const Bytes four = _mm512_set1_epi8(15), two = _mm512_set1_epi8(0x30);
    const auto joined = [&](Bytes low, Bytes top) {  // low & 15 | top & 0x30
        return _mm512_ternarylogic_epi32(_mm512_and_si512(top, two), low, four, 0xf8);
    };
    out[0] = joined(first, _mm512_slli_epi16(high, 4));
    out[1] = joined(_mm512_srli_epi16(first, 4), _mm512_slli_epi16(high, 2));
    out[2] = joined(second, high);
    out[3] = joined(_mm512_srli_epi16(second, 4), _mm512_srli_epi16(high, 2));
}
// Adds to each lane the products of its four weights and the four signed bytes at x.
inline Ints dot(Ints sum, Bytes weights, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(four));
}
// What is read once a step. AMD's processors then spare L2, others leave L2 and its own prefetching
// out, and wait.
inline void prefetch(const void* p) {
    if (kByAmd)
        _mm_prefetch(static_cast<const char*>(p), _MM_HINT_NTA);
    else
        _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
// Weights; `work`: products for each of their bytes. With much of it Zen 4 has lost the lines of L1
// when it comes to them.
inline void prefetch_weights(const void* p, int work) {
    const char* at = static_cast<const char*>(p) + kAhead;
    if (work <= kWorkInL1)
        prefetch(at);
    else
        _mm_prefetch(at, _MM_HINT_T1);
}
inline Floats zero_where_less(Floats x, Floats limit, Floats y) {  // y, 0 in lanes where x < limit
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y);
}
template <int Distance>  // lane i of the result is lane i ^ Distance of x
inline Floats swapped(Floats x) {
    if constexpr (Distance == 1) return _mm512_permute_ps(x, 0xb1);
    if constexpr (Distance == 2) return _mm512_permute_ps(x, 0x4e);
    if constexpr (Distance == 4) return _mm512_shuffle_f32x4(x, x, 0xb1);
    return _mm512_shuffle_f32x4(x, x, 0x4e);
}

// Transposes in[16], rows of 16 floats, into out[16][16].
inline void transpose(const Floats* in, float* out) {
    __m512 a[16], b[16];
    for (int i = 0; i < 8; i++) {
        a[2 * i] = _mm512_unpacklo_ps(in[2 * i], in[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_ps(in[2 * i], in[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            const __m512d low = _mm512_castps_pd(a[4 * i + j]),
                          high = _mm512_castps_pd(a[4 * i + 2 + j]);
            b[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            b[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    for (int j = 0; j < 4; j++) {  // b[4 i + j]: column j of each quarter, rows 4 i..
        const __m512 p = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88),
                     q = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88);
        const __m512 r = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd),
                     s = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
        store(out + 16 * j, _mm512_shuffle_f32x4(p, q, 0x88));
        store(out + 16 * (4 + j), _mm512_shuffle_f32x4(r, s, 0x88));
        store(out + 16 * (8 + j), _mm512_shuffle_f32x4(p, q, 0xdd));
        store(out + 16 * (12 + j), _mm512_shuffle_f32x4(r, s, 0xdd));
    }
}
// Lane i of the result: the sum of in[i], in pairs of lanes whose distance is 8, 4, 1 and 2.
inline Floats sums_across(const Floats* in) {
    const auto halves = [](Floats a, Floats b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    };
    const auto quarters = [](Floats a, Floats b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    const auto pairs = [](Floats a, Floats b) {
        return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
    };
    Floats four[4];  // of each: four lanes of in[i], in[i + 4], in[i + 8] and in[i + 12]
    for (int i = 0; i < 4; i++)
        four[i] = quarters(halves(in[i], in[i + 4]), halves(in[i + 8], in[i + 12]));
    return pairs(pairs(four[0], four[1]), pairs(four[2], four[3]));
}

}  // namespace streamspec::STREAMSPEC_ISA
