// The kernels, over the lanes of one instruction set (`simd_*.h`, included before this file).
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <utility>

#include "kernels/kernels.h"

namespace streamspec::STREAMSPEC_ISA {
namespace {

// Calls body(0) .. body(N - 1), each a constant: what they index stays in registers.
template <typename Body, int... I>
inline void each(const Body& body, std::integer_sequence<int, I...>) {
    (body(std::integral_constant<int, I>()), ...);
}
template <int N, typename Body>
inline void each(const Body& body) {
    each(body, std::make_integer_sequence<int, N>());
}

// ---- functions of lanes

// e^x, for x up to 88; exactly 0 below -87; no number of none. Cody and Waite's reduction, Cephes' polynomial: within 2 ulp.
inline Floats exponential(Floats x) {
    const Floats low = all(-87.0f);
    const Floats bounded = max(low, min(all(88.0f), x));  // in this order, what is no number stays so
    const Ints n = nearest(mul(bounded, all(1.44269504f)));
    const Floats turns = to_floats(n);
    Floats r = fnma(turns, all(0.693359375f), bounded);
    r = fnma(turns, all(-2.12194440e-4f), r);
    Floats p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), all(1.0f));
    return zero_where_less(x, low, mul(p, power_of_two(n)));
}

inline Floats sigmoid(Floats x) { return div(all(1.0f), add(all(1.0f), exponential(sub(all(0.0f), x)))); }

inline Floats hyperbolic_tangent(Floats x) {  // 2 sigmoid(2 x) - 1
    return fma(all(2.0f), sigmoid(add(x, x)), all(-1.0f));
}

template <Activation A>
inline Floats activated(Floats x) {
    if constexpr (A == Activation::kSilu) return mul(x, sigmoid(x));
    if constexpr (A == Activation::kRelu) return max(all(0.0f), x);  // in this order, what is no number stays so
    if constexpr (A == Activation::kRelu2) {
        const Floats above = max(all(0.0f), x);
        return mul(above, above);
    }
    if constexpr (A == Activation::kGeluTanh) {  // x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))
        const Floats cubic = fma(mul(mul(x, x), all(0.044715f)), x, x);
        return mul(x, sigmoid(mul(cubic, all(1.5957691216f))));
    }
    return x;
}

inline Floats activated(Activation kind, Floats x) {
    switch (kind) {
        case Activation::kSilu: return activated<Activation::kSilu>(x);
        case Activation::kGeluTanh: return activated<Activation::kGeluTanh>(x);
        case Activation::kRelu: return activated<Activation::kRelu>(x);
        case Activation::kRelu2: return activated<Activation::kRelu2>(x);
        default: return x;
    }
}

template <int Distance>
inline Floats butterfly(Floats x) {  // a + b in the lower of two lanes at this distance, a - b in the upper
    alignas(64) static constexpr auto signs = [] {
        struct { float of[kLanes]; } table{};
        for (int i = 0; i < static_cast<int>(kLanes); i++) table.of[i] = i & Distance ? -1.0f : 1.0f;
        return table;
    }();
    return fma(x, load(signs.of), swapped<Distance>(x));
}

// Times Sylvester's matrix of +-1, in blocks of 8, 16 or 32 (`arithmetic.hadamard` of the exporter).
inline void mix_row(float* x, size_t width, size_t block) {
    for (size_t i = 0; i < width; i += kLanes) {
        Floats y = butterfly<4>(butterfly<2>(butterfly<1>(load(x + i))));
        store(x + i, block >= 16 ? butterfly<8>(y) : y);
    }
    if (block < 32) return;
    for (size_t i = 0; i < width; i += 32) {
        const Floats a = load(x + i), b = load(x + i + 16);
        store(x + i, add(a, b));
        store(x + i + 16, sub(a, b));
    }
}

// One number of 16 lanes.
template <Floats (*Both)(Floats, Floats)>
inline float across(Floats x) {
    x = Both(x, swapped<8>(x));
    x = Both(x, swapped<4>(x));
    x = Both(x, swapped<2>(x));
    x = Both(x, swapped<1>(x));
    float out[kLanes];
    store(out, x);
    return out[0];
}

// ---- rows

// The largest magnitude; infinite or no number where one of them is.
inline float largest(const float* x, size_t width) {
    Floats most = all(0.0f);
    for (size_t i = 0; i < width; i += kLanes) most = larger(most, absolute(load(x + i)));
    return across<larger>(most);
}

// A step of codes -127..127, and its inverse: 0 where it would not be finite, for all codes to be 0 then.
struct Step {
    float scale, inverse;
    explicit Step(float most) : scale(most * (1.0f / 127.0f)), inverse(scale >= FLT_MIN && scale <= FLT_MAX ? 1.0f / scale : 0.0f) {
        if (!(scale <= FLT_MAX)) scale = NAN;
    }
};

constexpr int kSixOffset = 32;  // of codes in 6 bits

// Codes of `width` numbers, a multiple of 16. `Apart`: those of eight numbers as 0 2 4 6 1 3 5 7.
template <bool Apart>
inline void encode(const float* x, size_t width, float inverse, int8_t* codes) {
    if (inverse == 0.0f) {
        std::memset(codes, 0, width);
        return;
    }
    const Floats factor = all(inverse);
    for (size_t i = 0; i < width; i += kLanes) {
        const Ints values = nearest(mul(load(x + i), factor));
        store_bytes(codes + i, Apart ? apart(values) : values);
    }
}

inline int32_t sum_of(const int8_t* codes, size_t count) {
    int32_t sum = 0;
    for (size_t i = 0; i < count; i++) sum += codes[i];
    return sum;
}

void quantize(const Linear& map, const float* x, size_t from, size_t to, const Rows& out, float* scratch) {
    const size_t inputs = map.inputs, padded = round_up(inputs, kRowAlign);
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
            out.sums4[row * out.blocks + b] = static_cast<float>(sum_of(codes + b * map.block, map.block));
    }
}

void norm(const float* x, const float* update, const float* weight, float eps, size_t width, size_t from, size_t to,
          float* sum, float* y) {
    for (size_t row = from; row < to; row++) {
        const float* in = x + row * width;
        float* out = y + row * width;
        Floats squares = all(0.0f);
        for (size_t i = 0; i < width; i += kLanes) {
            Floats value = load(in + i);
            if (update) value = add(value, load(update + row * width + i));
            if (sum) store(sum + row * width + i, value);
            store(out + i, value);
            squares = fma(value, value, squares);
        }
        const Floats factor = all(1.0f / std::sqrt(across<add>(squares) / static_cast<float>(width) + eps));
        for (size_t i = 0; i < width; i += kLanes) store(out + i, mul(mul(load(out + i), factor), load(weight + i)));
    }
}

size_t argmax(const float* x, size_t width) {
    constexpr size_t kBlock = 64 * kLanes;  // looked through once more where the largest is
    float best = -INFINITY;
    size_t first = 0, last = 0;
    for (size_t from = 0; from < width; from += kBlock) {
        const size_t to = std::min(from + kBlock, width);
        Floats most[4] = {all(best), all(best), all(best), all(best)};
        size_t i = from;
        for (; i + 4 * kLanes <= to; i += 4 * kLanes) each<4>([&](auto j) { most[j] = max(load(x + i + j * kLanes), most[j]); });
        float largest = across<max>(max(max(most[0], most[1]), max(most[2], most[3])));
        for (; i < to; i++) largest = x[i] > largest ? x[i] : largest;
        if (largest > best) best = largest, first = from, last = to;
    }
    return best == -INFINITY ? 0 : static_cast<size_t>(std::find(x + first, x + last, best) - x);
}

// ---- linear maps

// Writes the results of one row of a tile: products, scaled.
inline void finish(const Linear& map, size_t tile, const Floats (&product)[2], float* y) {
    const size_t at = tile * kTile;
    Floats done[2] = {product[0], product[1]};
    if (map.bias) {
        done[0] = add(done[0], load(map.bias + at));
        done[1] = add(done[1], load(map.bias + at + kLanes));
    }
    if (map.gated) {
        store(y + tile * kLanes, mul(activated(map.activation, done[0]), done[1]));
        return;
    }
    if (map.activation != Activation::kNone)
        for (Floats& value : done) value = activated(map.activation, value);
    if (at + kTile <= map.outputs) {
        store(y + at, done[0]);
        store(y + at + kLanes, done[1]);
        return;
    }
    float part[kTile];
    store(part, done[0]);
    store(part + kLanes, done[1]);
    std::memcpy(y + at, part, (map.outputs - at) * sizeof(float));
}

constexpr size_t kSixes = 192;  // bytes of 16 outputs and inputs in 6 bits

// Adds products of N / Count rows with Count halves of a tile to their sums, row by row: of Groups groups of four inputs. A
// fold over all of them: sums that nested lambdas add to stay in memory from seven rows on (GCC 12).
template <size_t Groups, size_t Count, typename Weights, size_t N, int... I>
inline void add_products(Ints (&sums)[N], const Weights (&weights)[Groups][Count], const int8_t* x, size_t stride,
                         std::integer_sequence<int, I...>) {
    const auto with_all = [&](Ints sum, size_t half, const int8_t* of_row) {
        for (size_t g = 0; g < Groups; g++) sum = dot(sum, weights[g][half], of_row + 4 * g);
        return sum;
    };
    ((sums[I] = with_all(sums[I], I % Count, x + I / Count * stride)), ...);
}

// Products of R rows with halves First .. First + Count of a tile, in 8 or 6 bits.
template <int Bits, int R, int First, int Count>
inline void whole_sums(const Linear& map, const Rows& x, size_t tile, size_t row, Ints (*out)[2]) {
    constexpr size_t kInputs = Bits == 8 ? 4 : 16, kBytes = Bits == 8 ? 64 : kSixes;  // of a half, as they lie
    constexpr std::make_integer_sequence<int, R * Count> kAll{};
    const size_t steps = round_up(map.inputs, kInputs) / kInputs, stride = x.stride;
    const char* weights = static_cast<const char*>(map.codes) + 2 * tile * steps * kBytes + kBytes * First;
    const int8_t* inputs = x.codes + row * stride;
    Ints sums[R * Count];
    each<R * Count>([&](auto i) { sums[i] = all_ints(x.sums8[row + i / Count]); });
    if constexpr (Bits == 8) {
        const auto add = [&](size_t group) {
            Bytes four[1][Count];
            each<Count>([&](auto c) {
                const char* here = weights + 2 * kBytes * group + kBytes * c;
                four[0][c] = load_weights(reinterpret_cast<const int8_t*>(here));
                prefetch(here + kAhead);
            });
            add_products(sums, four, inputs + 4 * group, stride, kAll);
        };
        size_t k = 0;
        for (; k + kGroups8 <= steps; k += kGroups8, weights += 2 * kBytes * kGroups8, inputs += 4 * kGroups8)
            each<kGroups8>(add);
        for (; k < steps; k++, weights += 2 * kBytes, inputs += 4) add(0);
    } else {
        for (size_t k = 0; k < steps; k++, weights += 2 * kBytes, inputs += 16) {
            Nibbles groups[4][Count];
            each<Count>([&](auto c) {
                Nibbles own[4];
                load_sixes(reinterpret_cast<const uint8_t*>(weights + kBytes * c), own);
                each<4>([&](auto g) { groups[g][c] = own[g]; });
                for (size_t i = 0; i < kBytes; i += 64) prefetch(weights + kBytes * c + i + kAhead);
            });
            add_products(sums, groups, inputs, stride, kAll);
        }
    }
    each<R * Count>([&](auto i) { out[i / Count][First + i % Count] = sums[i]; });
}

template <int Bits, int R>
void whole_tile(const Linear& map, const Rows& x, size_t tile, size_t row, float* y) {
    Ints sums[R][2];
    if constexpr (R <= kBoth8) {
        whole_sums<Bits, R, 0, 2>(map, x, tile, row, sums);
    } else {
        whole_sums<Bits, R, 0, 1>(map, x, tile, row, sums);
        whole_sums<Bits, R, 1, 1>(map, x, tile, row, sums);
    }
    const Floats low = load(map.scales + tile * kTile), high = load(map.scales + tile * kTile + kLanes);
    each<R>([&](auto r) {
        const Floats scale = all(x.scales[row + r]);
        const Floats product[2] = {mul(mul(to_floats(sums[r][0]), low), scale), mul(mul(to_floats(sums[r][1]), high), scale)};
        finish(map, tile, product, y + (row + r) * map.width());
    });
}

inline Floats load_zeros(const uint8_t* p) { return load_bytes(reinterpret_cast<const int8_t*>(p)); }

// As `sum8`, scaled.
template <int R, int First, int Count>
inline void sum4(const Linear& map, const Rows& x, size_t tile, size_t row, Floats (*out)[2]) {
    const size_t blocks = x.blocks, steps = map.block / 8, stride = x.stride;
    const uint8_t* weights = static_cast<const uint8_t*>(map.codes) + tile * (map.inputs / 8) * 128 + 64 * First;
    const size_t at = tile * blocks * kTile + kLanes * First;
    const uint16_t* scales = map.block_scales + at;
    const uint8_t* zeros = map.zeros ? map.zeros + at : nullptr;
    const int8_t* inputs = x.codes + row * stride;
    constexpr std::make_integer_sequence<int, R * Count> kAll{};
    each<R>([&](auto r) { each<Count>([&](auto c) { out[r][First + c] = all(0.0f); }); });
    for (size_t b = 0; b < blocks; b++) {
        Ints sums[R * Count];
        each<R * Count>([&](auto i) { sums[i] = all_ints(0); });
        for (size_t k = 0; k < steps; k += kGroups4, weights += 128 * kGroups4, inputs += 8 * kGroups4)
            each<kGroups4>([&](auto g) {
                Nibbles halves[2][Count];
                each<Count>([&](auto c) {
                    load_nibbles(weights + 128 * g + 64 * c, halves[0][c], halves[1][c]);
                    prefetch(weights + 128 * g + 64 * c + kAhead);
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
                out[r][First + c] = fma(fnma(zero[c], sum, to_floats(sums[r * Count + c])), scale[c], out[r][First + c]);
            });
        });
    }
    each<R>([&](auto r) { each<Count>([&](auto c) { out[r][First + c] = mul(out[r][First + c], all(x.scales[row + r])); }); });
}

template <int R>
void tile4(const Linear& map, const Rows& x, size_t tile, size_t row, float* y) {
    Floats product[R][2];
    if constexpr (R <= kBoth4) {
        sum4<R, 0, 2>(map, x, tile, row, product);
    } else {
        sum4<R, 0, 1>(map, x, tile, row, product);
        sum4<R, 1, 1>(map, x, tile, row, product);
    }
    each<R>([&](auto r) { finish(map, tile, product[r], y + (row + r) * map.width()); });
}

using Tile = void (*)(const Linear&, const Rows&, size_t, size_t, float*);
template <int Bits, int R>
constexpr Tile tile_of() {
    if constexpr (Bits == 4) return tile4<R>;
    else return whole_tile<Bits, R>;
}
template <int Bits, int... R>
constexpr auto tiles(std::integer_sequence<int, R...>) {
    struct { Tile of[sizeof...(R)]; } table{{tile_of<Bits, R + 1>()...}};
    return table;
}
constexpr auto kTiles8 = tiles<8>(std::make_integer_sequence<int, kRows8>());
constexpr auto kTiles6 = tiles<6>(std::make_integer_sequence<int, kRows6>());
constexpr auto kTiles4 = tiles<4>(std::make_integer_sequence<int, kRows4>());

void linear(const Linear& map, const Rows& x, size_t from, size_t to, float* y) {
    const Tile* table = map.bits == 8 ? kTiles8.of : map.bits == 6 ? kTiles6.of : kTiles4.of;
    const size_t most = map.bits == 8 ? kRows8 : map.bits == 6 ? kRows6 : kRows4, passes = (x.rows + most - 1) / most;
    const size_t height = (x.rows + passes - 1) / passes;
    for (size_t tile = from; tile < to; tile++)
        for (size_t row = 0; row < x.rows; row += height) table[std::min(height, x.rows - row) - 1](map, x, tile, row, y);
}

// Code of input i of an output, in 6 bits; `codes` of its tile's half, `lane`: of the output in it.
inline int six(const uint8_t* codes, size_t lane, size_t i) {
    const uint8_t* at = codes + i / 16 * 2 * kSixes + 4 * lane + i % 4;
    const size_t group = i % 16 / 4;
    return ((at[group / 2 * 64] >> group % 2 * 4 & 15) | (at[128] >> group * 2 & 3) << 4) - kSixOffset;
}

void look_up(const Linear& map, size_t id, float* y) {
    const size_t tile = id / kTile, output = id % kTile;
    const float scale = map.scales[id];
    if (map.bits == 8) {
        const int8_t* codes = static_cast<const int8_t*>(map.codes) + tile * round_up(map.inputs, 4) * kTile + output * 4;
        for (size_t i = 0; i < map.inputs; i++) y[i] = static_cast<float>(codes[i / 4 * 128 + i % 4]) * scale;
    } else {
        const uint8_t* codes = static_cast<const uint8_t*>(map.codes) + tile * round_up(map.inputs, 16) / 16 * 2 * kSixes;
        codes += output / kLanes * kSixes;
        for (size_t i = 0; i < map.inputs; i++) y[i] = static_cast<float>(six(codes, output % kLanes, i)) * scale;
    }
    if (map.mix) mix_row(y, map.inputs, map.mix);
}

// ---- attention

// Norm and rotation of one head's vector x [width] of row `row`, into y.
inline void turn(const Attention& a, const float* x, size_t row, const float* weight, float* y) {
    std::memcpy(y, x, a.width * sizeof(float));
    auto normalise = [&] {
        if (weight) norm(y, nullptr, weight, a.eps, a.width, 0, 1, nullptr, y);
    };
    if (!a.norm_last) normalise();
    if (a.cos) {
        const size_t half = a.rotated / 2;
        const float *cos = a.cos + row * half, *sin = a.sin + row * half;
        for (size_t i = 0; i < half; i++) {
            const size_t first = a.interleaved ? 2 * i : i, second = a.interleaved ? 2 * i + 1 : i + half;
            const float u = y[first], v = y[second];
            y[first] = std::fma(u, cos[i], -(v * sin[i]));
            y[second] = std::fma(v, cos[i], u * sin[i]);
        }
    }
    if (a.norm_last) normalise();
}

inline size_t slot_of(const Attention& a, size_t row) { return a.ring ? (a.past + row) % a.slots : a.past + row; }

void store_keys(const Attention& a, size_t from, size_t to) {
    float turned[kMostWidth];
    for (size_t row = from; row < to; row++)
        for (size_t head = 0; head < a.kv_heads; head++) {
            const float* in = a.packed + row * a.packed_stride;
            turn(a, in + a.key_at + head * a.width, row, a.key_norm, turned);
            const float* value = in + a.value_at + head * a.width;
            if (!a.write) {
                float* at = a.own_keys + (head * a.own + row) * a.width;
                std::memcpy(at, turned, a.width * sizeof(float));
                continue;
            }
            const size_t at = (head * a.slots + slot_of(a, row)) * a.width;
            if (!a.half) {
                std::memcpy(static_cast<float*>(a.keys) + at, turned, a.width * sizeof(float));
                std::memcpy(static_cast<float*>(a.values) + at, value, a.width * sizeof(float));
                continue;
            }
            const Floats most = all(65504.0f), least = all(-65504.0f);
            for (size_t i = 0; i < a.width; i += kLanes) {
                store_half(static_cast<uint16_t*>(a.keys) + at + i, max(min(load(turned + i), most), least));
                store_half(static_cast<uint16_t*>(a.values) + at + i, max(min(load(value + i), most), least));
            }
        }
}

// Keys or values of one head. `at(slot)`: [width] there.
template <typename Number>
struct Cached {
    const Number* base;
    size_t width;
    Floats at(size_t slot, size_t i) const {
        if constexpr (sizeof(Number) == 2) return load_half(reinterpret_cast<const uint16_t*>(base) + slot * width + i);
        else return load(reinterpret_cast<const float*>(base) + slot * width + i);
    }
};
// Values of the rows themselves lie in the packed rows.
struct Packed {
    const float* base;
    size_t stride;
    Floats at(size_t slot, size_t i) const { return load(base + slot * stride + i); }
};

// Scores of `queries` [.., width] with `count` keys, into scores[q * columns + slot], biases added; padding is -inf.
template <typename Keys>
void score(const Attention& a, const Keys& keys, size_t count, const float* queries, size_t queries_count, size_t group,
           const float* bias, size_t bias_stride, float* scores, size_t columns, float* turned, float* most) {
    const size_t width = a.width;
    for (size_t slot = 0; slot < count; slot += kLanes) {
        const size_t here = std::min(kLanes, count - slot);
        for (size_t i = 0; i < width; i += kLanes) {
            Floats rows[kLanes];
            for (size_t j = 0; j < kLanes; j++) rows[j] = j < here ? keys.at(slot + j, i) : all(0.0f);
            transpose(rows, turned + i * kLanes);
        }
        auto batch = [&](auto size, size_t first) {
            constexpr int Q = decltype(size)::value;
            Floats sums[Q];
            each<Q>([&](auto q) { sums[q] = all(0.0f); });
            const float* x = queries + first * width;
            for (size_t d = 0; d < width; d++) {
                const Floats key = load(turned + d * kLanes);
                each<Q>([&](auto q) { sums[q] = fma(all(x[q * width + d]), key, sums[q]); });
            }
            each<Q>([&](auto q) {
                Floats s = mul(sums[q], all(a.scale));
                if (a.cap > 0.0f) s = mul(hyperbolic_tangent(mul(s, all(1.0f / a.cap))), all(a.cap));
                const float* own = bias + (first + q) / group * bias_stride + slot;
                if (here == kLanes) {
                    s = add(s, load(own));
                } else {
                    float part[kLanes];
                    for (size_t j = 0; j < kLanes; j++) part[j] = j < here ? own[j] : -INFINITY;
                    s = add(s, load(part));
                }
                store(scores + (first + q) * columns + slot, s);
                most[first + q] = std::max(most[first + q], across<max>(s));
            });
        };
        size_t first = 0;
        for (; first + kQueries <= queries_count; first += kQueries) batch(std::integral_constant<int, kQueries>(), first);
        for (; first + 3 <= queries_count; first += 3) batch(std::integral_constant<int, 3>(), first);
        for (; first < queries_count; first++) batch(std::integral_constant<int, 1>(), first);
    }
}

// Adds weights times values [count, Parts * 16 from `i` on] and, where `sums`, the weights themselves.
template <int Q, int Parts, typename Values>
inline void gather(const Values& values, size_t count, size_t i, const float* weights, size_t columns, Floats (*out)[Parts],
                   Floats* sums) {
    for (size_t slot = 0; slot < count; slot++) {
        Floats value[Parts];
        each<Parts>([&](auto p) { value[p] = values.at(slot, i + p * kLanes); });
        each<Q>([&](auto q) {
            const Floats weight = all(weights[q * columns + slot]);
            sums[q] = add(sums[q], weight);
            each<Parts>([&](auto p) { out[q][p] = fma(weight, value[p], out[q][p]); });
        });
    }
}

constexpr size_t kSoon = 256;  // slots whose values are fetched ahead

template <typename Number>
void attend_over(const Attention& a, size_t kv_head, size_t from, size_t to, float* scratch) {
    const size_t group = a.heads / a.kv_heads, width = a.width, queries = (to - from) * group;
    const size_t bias_stride = a.used + a.own, seen_columns = round_up(a.used, kLanes);
    const size_t columns = seen_columns + round_up(a.own, kLanes);
    float *vectors = scratch, *scores = vectors + queries * width, *turned = scores + queries * columns;
    const float* bias = a.bias + from * bias_stride;
    size_t used = 0;  // what no row sees at the end of the cache is not read
    for (size_t row = from; row < to; row++) {
        const float* own = a.bias + row * bias_stride;
        size_t last = a.used;
        while (last > used && own[last - 1] < kMasked) last--;
        used = std::max(used, last);
    }
    for (size_t row = from; row < to; row++)
        for (size_t g = 0; g < group; g++)
            turn(a, a.packed + row * a.packed_stride + a.query_at + (kv_head * group + g) * width, row, a.query_norm,
                 vectors + ((row - from) * group + g) * width);
    float most[kMostGroup];  // queries are one row's, or few
    std::fill(most, most + queries, -INFINITY);
    const size_t cached = kv_head * a.slots * width;
    const Cached<Number> keys{static_cast<const Number*>(a.keys) + cached, width};
    const Cached<Number> values{static_cast<const Number*>(a.values) + cached, width};
    const Cached<float> own_keys{a.own_keys + kv_head * a.own * width, width};
    const Packed own_values{a.packed + a.value_at + kv_head * width, a.packed_stride};
    for (size_t i = 0; i < std::min(used, kSoon) * width * sizeof(Number); i += 64)  // while scores are computed
        prefetch(reinterpret_cast<const char*>(values.base) + i);
    score(a, keys, used, vectors, queries, group, bias, bias_stride, scores, columns, turned, most);
    if (a.own)
        score(a, own_keys, a.own, vectors, queries, group, bias + a.used, bias_stride, scores + seen_columns, columns, turned,
              most);
    for (size_t q = 0; q < queries; q++) {
        const Floats top = all(most[q]);
        float* own = scores + q * columns;
        for (size_t i = 0; i < used; i += kLanes) store(own + i, exponential(sub(load(own + i), top)));
        for (size_t i = seen_columns; i < columns; i += kLanes) store(own + i, exponential(sub(load(own + i), top)));
    }
    auto mix = [&](auto rows, auto parts, size_t q, size_t i) {
        constexpr int Q = decltype(rows)::value, Parts = decltype(parts)::value;
        Floats out[Q][Parts], sums[Q];
        each<Q>([&](auto j) {
            sums[j] = all(0.0f);
            each<Parts>([&](auto p) { out[j][p] = all(0.0f); });
        });
        gather<Q, Parts>(values, used, i, scores + q * columns, columns, out, sums);
        if (a.own) gather<Q, Parts>(own_values, a.own, i, scores + q * columns + seen_columns, columns, out, sums);
        each<Q>([&](auto j) {
            const size_t row = from + (q + j) / group, head = kv_head * group + (q + j) % group;
            each<Parts>([&](auto p) {
                store(a.mixed + (row * a.heads + head) * width + i + p * kLanes, div(out[j][p], sums[j]));
            });
        });
    };
    auto mix_rows = [&](auto parts, size_t i) {
        size_t q = 0;
        for (; q + 3 <= queries; q += 3) mix(std::integral_constant<int, 3>(), parts, q, i);
        for (; q < queries; q++) mix(std::integral_constant<int, 1>(), parts, q, i);
    };
    size_t i = 0;
    for (; i + 4 * kLanes <= width; i += 4 * kLanes) mix_rows(std::integral_constant<int, 4>(), i);
    for (; i < width; i += kLanes) mix_rows(std::integral_constant<int, 1>(), i);
}

void attend(const Attention& a, size_t kv_head, size_t from, size_t to, float* scratch) {
    if (a.half) attend_over<uint16_t>(a, kv_head, from, to, scratch);
    else attend_over<float>(a, kv_head, from, to, scratch);
}

}  // namespace

#define STREAMSPEC_TEXT(name) #name
#define STREAMSPEC_NAME(name) STREAMSPEC_TEXT(name)
extern const Kernels kKernels;
const Kernels kKernels = {STREAMSPEC_NAME(STREAMSPEC_ISA), quantize, linear, look_up, store_keys, attend, norm, argmax};

}  // namespace streamspec
