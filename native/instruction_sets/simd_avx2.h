// 16 lanes in two registers: AVX2 with FMA and F16C; with AVX-VNNI where STREAMSPEC_AVXVNNI is 1.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace streamspec::STREAMSPEC_ISA {

constexpr int kRows8 = STREAMSPEC_AVXVNNI ? 4 : 6, kRows6 = 6,
              kRows4 = 4;  // rows of a pass over a tile of weights
constexpr int
    kBoth8 = 2,
    kBoth4 = 1;  // up to this many rows, both halves of a tile at once: else 16 registers are few
constexpr int kGroups8 = 1, kGroups4 = 1;  // of 4 and 8 inputs in a round of the loop
constexpr int kRowsStored = STREAMSPEC_AVXVNNI ? 4 : 8, kRowsSigned = 4,
              kBothStored = 1;  // the same of stored blocks, codes unsigned or signed
constexpr int kQueries = 3;     // of attention, at a time
constexpr int kFewQueries = 8;  // up to which keys are not transposed
constexpr int kAhead = 1024;    // bytes that are prefetched ahead
constexpr int kFar = 8192;      // the same of weights, into L2: over the border of a page

struct Floats {
    __m256 low, high;
};
struct Ints {
    __m256i low, high;
};
struct Bytes {
    __m256i low, high;
};
struct Nibbles {
    __m256i low, high;
};

inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}
inline Floats load_half(const uint16_t* p) {
    const __m128i* at = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
inline void store_half(uint16_t* p, Floats x) {
    __m128i* at = reinterpret_cast<__m128i*>(p);
    _mm_storeu_si128(at, _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(at + 1, _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT));
}
inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Ints all_ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Floats add(Floats a, Floats b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline Floats sub(Floats a, Floats b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
inline Floats mul(Floats a, Floats b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Floats div(Floats a, Floats b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
inline Floats fma(Floats a, Floats b, Floats c) {  // a b + c
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats fnma(Floats a, Floats b, Floats c) {  // c - a b
    return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline Floats max(Floats a, Floats b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Floats min(Floats a, Floats b) {
    return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
inline __m256 larger(__m256 a, __m256 b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
// Of magnitudes; what is no number is larger than all that are.
inline Floats larger(Floats a, Floats b) { return {larger(a.low, b.low), larger(a.high, b.high)}; }
inline Floats absolute(Floats a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
inline Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
inline Ints nearest(Floats a) {
    return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)};
}  // ties to even
inline __m256 power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline Floats power_of_two(Ints n) {
    return {power_of_two(n.low), power_of_two(n.high)};
}  // 2^n, -126 <= n <= 127
inline void store_bytes(int8_t* p, Ints a) {  // of -128..127
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.low, a.high), 0xd8);
    const __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline Ints evens_first(Ints a) {  // of eight neighbours 0 2 4 6 1 3 5 7
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    return {_mm256_permutevar8x32_epi32(a.low, order), _mm256_permutevar8x32_epi32(a.high, order)};
}
inline Floats load_bytes(const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}

inline __m256i load_bits(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline __m256i four_codes(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
inline Nibbles nibbles(__m256i low, __m256i high) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(low, mask), _mm256_and_si256(high, mask)};
}
inline void load_nibbles(const uint8_t* p, Nibbles& low, Nibbles& high) {
    const __m256i a = load_bits(p), b = load_bits(p + 32);
    low = nibbles(a, b);
    high = nibbles(_mm256_srli_epi16(a, 4), _mm256_srli_epi16(b, 4));
}
// The bytes that `codes` 0..15 choose of a table of 16, which each quarter of a register holds.
inline Bytes looked_up(Nibbles codes, Bytes table) {
    return {_mm256_shuffle_epi8(table.low, codes.low), _mm256_shuffle_epi8(table.high, codes.high)};
}
inline __m256i joined(__m256i low, __m256i top) {
    return _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(15)),
                           _mm256_and_si256(top, _mm256_set1_epi8(0x30)));
}
// Codes of four groups of four inputs, 0..63.
inline void load_sixes(const uint8_t* p, Nibbles (&out)[4]) {
    __m256i of[4][2];
    for (int i = 0; i < 2; i++) {
        const __m256i first = load_bits(p + 32 * i), second = load_bits(p + 64 + 32 * i),
                      high = load_bits(p + 128 + 32 * i);
        of[0][i] = joined(first, _mm256_slli_epi16(high, 4));
        of[1][i] = joined(_mm256_srli_epi16(first, 4), _mm256_slli_epi16(high, 2));
        of[2][i] = joined(second, high);
        of[3][i] = joined(_mm256_srli_epi16(second, 4), _mm256_srli_epi16(high, 2));
    }
    for (int g = 0; g < 4; g++) out[g] = {of[g][0], of[g][1]};
}

#if STREAMSPEC_AVXVNNI
// A weight for `dot`: unsigned, so 128 is added to signed ones.
inline Bytes load_weights(const int8_t* p) {
    const __m256i offset = _mm256_set1_epi8(static_cast<char>(0x80));
    return {_mm256_xor_si256(load_bits(p), offset), _mm256_xor_si256(load_bits(p + 32), offset)};
}
constexpr int kWeightOffset = 128;
// Adds to each lane the products of its four weights and the four signed bytes at x.
inline Ints dot(Ints sum, Bytes weights, const int8_t* x) {
    const __m256i codes = four_codes(x);
    return {_mm256_dpbusd_avx_epi32(sum.low, weights.low, codes),
            _mm256_dpbusd_avx_epi32(sum.high, weights.high, codes)};
}
inline Ints dot(Ints sum, Nibbles weights, const int8_t* x) {
    return dot(sum, Bytes{weights.low, weights.high}, x);
}
using NibbleSum = Ints;  // of products of nibbles 0..15 with 32 inputs
#else
inline Bytes load_weights(const int8_t* p) { return {load_bits(p), load_bits(p + 32)}; }
constexpr int kWeightOffset = 0;
inline __m256i add_pairs(__m256i sum, __m256i words) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
}
// Magnitudes of weights times codes with the weights' signs. Two products are at most 2 * 128 *
// 127, which 16 bits hold: codes of rows are -127..127.
inline __m256i dot(__m256i sum, __m256i weights, __m256i codes) {
    return add_pairs(
        sum, _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(codes, weights)));
}
// Adds to each lane the products of its four weights and the four signed bytes at x.
inline Ints dot(Ints sum, Bytes weights, const int8_t* x) {
    const __m256i codes = four_codes(x);
    return {dot(sum.low, weights.low, codes), dot(sum.high, weights.high, codes)};
}
inline Ints dot(Ints sum, Nibbles weights, const int8_t* x) {
    const __m256i codes = four_codes(x);
    return {add_pairs(sum.low, _mm256_maddubs_epi16(weights.low, codes)),
            add_pairs(sum.high, _mm256_maddubs_epi16(weights.high, codes))};
}
// As sums of 16 bits, which hold four times 63 * 127.
inline __m256i dot_two(__m256i sum, __m256i first, __m256i second, __m256i x, __m256i y) {
    return add_pairs(
        sum, _mm256_add_epi16(_mm256_maddubs_epi16(first, x), _mm256_maddubs_epi16(second, y)));
}
inline Ints dot_two(Ints sum, Nibbles first, Nibbles second, const int8_t* x) {
    const __m256i low = four_codes(x), high = four_codes(x + 4);
    return {dot_two(sum.low, first.low, second.low, low, high),
            dot_two(sum.high, first.high, second.high, low, high)};
}
// Of products of nibbles 0..15 with 32 inputs: of 16 bits, which hold eight times 2 * 15 * 127.
struct NibbleSum {
    __m256i low, high;
};
inline __m256i add_words(__m256i sum, __m256i weights, __m256i codes) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, codes));
#ifdef __GNUC__
    asm("" : "+x"(sum));  // GCC 12 would add in pairs first, with more sums than registers
#endif
    return sum;
}
inline NibbleSum dot(NibbleSum sum, Nibbles weights, const int8_t* x) {
    const __m256i codes = four_codes(x);
    return {add_words(sum.low, weights.low, codes), add_words(sum.high, weights.high, codes)};
}
inline void begin(NibbleSum& sum, int32_t) {
    sum = {_mm256_setzero_si256(), _mm256_setzero_si256()};
}
inline Ints end(NibbleSum sum, int32_t first) {
    const __m256i start = _mm256_set1_epi32(first);
    return {add_pairs(start, sum.low), add_pairs(start, sum.high)};
}
#endif

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_weights(const void* p, int) {
    const char* at = static_cast<const char*>(p);
    _mm_prefetch(at + kFar, _MM_HINT_T1);
    prefetch(at + kAhead);
}
inline Floats zero_where_less(Floats x, Floats limit, Floats y) {  // y, 0 in lanes where x < limit
    return {_mm256_and_ps(_mm256_cmp_ps(x.low, limit.low, _CMP_NLT_UQ), y.low),
            _mm256_and_ps(_mm256_cmp_ps(x.high, limit.high, _CMP_NLT_UQ), y.high)};
}
template <int Distance>  // lane i of the result is lane i ^ Distance of x
inline Floats swapped(Floats x) {
    if constexpr (Distance == 1)
        return {_mm256_permute_ps(x.low, 0xb1), _mm256_permute_ps(x.high, 0xb1)};
    if constexpr (Distance == 2)
        return {_mm256_permute_ps(x.low, 0x4e), _mm256_permute_ps(x.high, 0x4e)};
    if constexpr (Distance == 4)
        return {_mm256_permute2f128_ps(x.low, x.low, 1), _mm256_permute2f128_ps(x.high, x.high, 1)};
    return {x.high, x.low};
}

// Columns i, i + 1, i + 4 and i + 5 of eight rows, from their neighbours interleaved; columns are
// 16 floats apart.
inline void store_columns(__m256 ab, __m256 cd, __m256 ef, __m256 gh, float* out) {
    const __m256 w = _mm256_shuffle_ps(ab, cd, 0x44), x = _mm256_shuffle_ps(ef, gh, 0x44);
    const __m256 y = _mm256_shuffle_ps(ab, cd, 0xee), z = _mm256_shuffle_ps(ef, gh, 0xee);
    _mm256_storeu_ps(out, _mm256_permute2f128_ps(w, x, 0x20));
    _mm256_storeu_ps(out + 16, _mm256_permute2f128_ps(y, z, 0x20));
    _mm256_storeu_ps(out + 64, _mm256_permute2f128_ps(w, x, 0x31));
    _mm256_storeu_ps(out + 80, _mm256_permute2f128_ps(y, z, 0x31));
}
inline void transpose(__m256 a, __m256 b, __m256 c, __m256 d, __m256 e, __m256 f, __m256 g,
                      __m256 h, float* out) {
    store_columns(_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d), _mm256_unpacklo_ps(e, f),
                  _mm256_unpacklo_ps(g, h), out);
    store_columns(_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d), _mm256_unpackhi_ps(e, f),
                  _mm256_unpackhi_ps(g, h), out + 32);
}
// Transposes in[16], rows of 16 floats, into out[16][16].
inline void transpose(const Floats* in, float* out) {
    for (int i = 0; i < 16; i += 8) {
        const Floats* r = in + i;
        transpose(r[0].low, r[1].low, r[2].low, r[3].low, r[4].low, r[5].low, r[6].low, r[7].low,
                  out + i);
        transpose(r[0].high, r[1].high, r[2].high, r[3].high, r[4].high, r[5].high, r[6].high,
                  r[7].high, out + 128 + i);
    }
}
// Lane i of the result: the sum of in[i], in pairs of lanes whose distance is 8, 4, 1 and 2.
inline Floats sums_across(const Floats* in) {
    const auto quarters = [](Floats a, Floats b) {
        const __m256 x = _mm256_add_ps(a.low, a.high), y = _mm256_add_ps(b.low, b.high);
        return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20),
                             _mm256_permute2f128_ps(x, y, 0x31));
    };
    const auto eight = [&](const Floats* a) {
        return _mm256_hadd_ps(_mm256_hadd_ps(quarters(a[0], a[4]), quarters(a[1], a[5])),
                              _mm256_hadd_ps(quarters(a[2], a[6]), quarters(a[3], a[7])));
    };
    return {eight(in), eight(in + 8)};
}

}  // namespace streamspec::STREAMSPEC_ISA
