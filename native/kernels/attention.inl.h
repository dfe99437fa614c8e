// Attention of rows over a cache and, in drafts, over the rows' own keys.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/rows.inl.h"

namespace streamspec::STREAMSPEC_ISA {
namespace {

// Norm and rotation of a head's vector x [width] of row `row`, into y.
inline void norm_and_rotate(const Attention& a, const float* x, size_t row, const float* weight,
                            float* y) {
    std::memcpy(y, x, a.width * sizeof(float));
    const auto normalise = [&] {
        if (weight) norm(y, nullptr, weight, a.eps, a.width, 0, 1, nullptr, y);
    };
    if (!a.norm_last) normalise();
    if (a.cos) {
        const size_t half = a.rotated / 2;
        const float *cos = a.cos + row * half, *sin = a.sin + row * half;
        for (size_t i = 0; i < half; i++) {
            const size_t first = a.interleaved ? 2 * i : i;
            const size_t second = a.interleaved ? 2 * i + 1 : i + half;
            const float u = y[first], v = y[second];
            y[first] = std::fma(u, cos[i], -(v * sin[i]));
            y[second] = std::fma(v, cos[i], u * sin[i]);
        }
    }
    if (a.norm_last) normalise();
}

inline size_t slot_of(const Attention& a, size_t row) {
    return a.ring ? (a.past_length + row) % a.slots : a.past_length + row;
}

// In this order, what is no number stays so.
inline void store_halves(void* cache, size_t offset, const float* x, size_t width) {
    constexpr float kMaxHalf = 65504.0f;
    uint16_t* to = static_cast<uint16_t*>(cache) + offset;
    for (size_t i = 0; i < width; i += kLanes)
        store_half(to + i, max(all(-kMaxHalf), min(all(kMaxHalf), load(x + i))));
}

void store_keys(const Attention& a, size_t from, size_t to) {
    const size_t bytes = a.width * sizeof(float);
    float key[kMaxHeadWidth];
    for (size_t row = from; row < to; row++)
        for (size_t head = 0; head < a.kv_heads; head++) {
            const float* packed = a.packed + row * a.packed_stride + head * a.width;
            const float* value = packed + a.value_offset;
            norm_and_rotate(a, packed + a.key_offset, row, a.key_norm, key);
            if (!a.write) {
                std::memcpy(a.row_keys + (head * a.row_columns + row) * a.width, key, bytes);
                continue;
            }
            const size_t offset = (head * a.slots + slot_of(a, row)) * a.width;
            if (a.half) {
                store_halves(a.keys, offset, key, a.width);
                store_halves(a.values, offset, value, a.width);
            } else {
                std::memcpy(static_cast<float*>(a.keys) + offset, key, bytes);
                std::memcpy(static_cast<float*>(a.values) + offset, value, bytes);
            }
        }
}

// Keys or values of a head, float32 or float16: 16 numbers from `i` on of what lies in a slot.
template <typename Number>
struct CacheHead {
    const Number* base;
    size_t width;
    Floats at(size_t slot, size_t i) const {
        if constexpr (sizeof(Number) == 2)
            return load_half(base + slot * width + i);
        else
            return load(base + slot * width + i);
    }
};
// Values of the rows themselves lie in the packed rows.
struct PackedHead {
    const float* base;
    size_t stride;
    Floats at(size_t row, size_t i) const { return load(base + row * stride + i); }
};

// Queries of rows [from, ..) and of `group` heads from `head` on, which share a key head, row by
// row, and the memory of their scores: columns of the cache, padded to whole vectors, then those of
// the rows themselves.
struct Queries {
    size_t kv_head, head, from, group, count, cache_columns, columns;
    float* vectors;        // [count, width]
    float* scores;         // [count, columns]
    float* transposed;     // [width, 16]: of the keys of 16 slots
    float max[kMaxGroup];  // of the scores of each; queries are one row's, or few
};

template <int Q>
struct Batch {
    Floats of[Q];
};

// Products of a batch of queries x [.., width] with the keys of 16 slots. All are added in one
// order, whichever of the two computes them: those of dimensions 16 apart one after the other, then
// these 16 sums in pairs whose distance is 8, 4, 1 and 2.
template <int Q, typename Keys>
inline void products(const Keys& keys, size_t slot, size_t here, const float* x, size_t width,
                     Batch<Q>& out) {
    Floats sums[Q][kLanes];
    for (size_t j = 0; j < kLanes; j++) {
        Batch<Q> sum;
        each<Q>([&](auto q) { sum.of[q] = all(0.0f); });
        for (size_t i = 0; j < here && i < width; i += kLanes) {
            const Floats key = keys.at(slot + j, i);
            each<Q>([&](auto q) { sum.of[q] = fma(load(x + q * width + i), key, sum.of[q]); });
        }
        each<Q>([&](auto q) { sums[q][j] = sum.of[q]; });
    }
    each<Q>([&](auto q) { out.of[q] = sums_across(sums[q]); });
}

// The same of keys that lie transposed, [width, 16].
template <int Q>
inline void products_of_transposed(const float* keys, const float* x, size_t width, Batch<Q>& out) {
    const auto add_to = [](Batch<Q>& sum, const Batch<Q>& other) {
        each<Q>([&](auto q) { sum.of[q] = add(sum.of[q], other.of[q]); });
    };
    const auto lane = [&](size_t first) {
        Batch<Q> sum;
        each<Q>([&](auto q) { sum.of[q] = all(0.0f); });
        for (size_t i = first; i < width; i += kLanes) {
            const Floats key = load(keys + i * kLanes);
            each<Q>([&](auto q) { sum.of[q] = fma(all(x[q * width + i]), key, sum.of[q]); });
        }
        return sum;
    };
    const auto four_lanes = [&](size_t first) {
        Batch<Q> sum = lane(first);
        add_to(sum, lane(first + 8));
        Batch<Q> other = lane(first + 4);
        add_to(other, lane(first + 12));
        add_to(sum, other);
        return sum;
    };
    out = four_lanes(0);
    add_to(out, four_lanes(1));
    Batch<Q> other = four_lanes(2);
    add_to(other, four_lanes(3));
    add_to(out, other);
}

// Scores of all queries with `count` keys, biases added: into `column` on, padded with -inf.
template <typename Keys>
void score(const Attention& a, const Keys& keys, size_t count, Queries& queries, size_t column,
           size_t bias_column) {
    const size_t width = a.width, group = queries.group, columns = queries.columns;
    const size_t bias_stride = a.used + a.row_columns;
    const float* bias = a.bias + queries.from * bias_stride + bias_column;
    float *scores = queries.scores + column, *transposed = queries.transposed, *top = queries.max;
    const bool few = queries.count <= kFewQueries;  // for which transposing does not pay
    for (size_t slot = 0; slot < count; slot += kLanes) {
        const size_t here = std::min(kLanes, count - slot);
        for (size_t i = 0; !few && i < width; i += kLanes) {
            Floats rows[kLanes];
            for (size_t j = 0; j < kLanes; j++)
                rows[j] = j < here ? keys.at(slot + j, i) : all(0.0f);
            transpose(rows, transposed + i * kLanes);
        }
        const auto batch = [&](auto size, size_t first) {
            constexpr int Q = decltype(size)::value;
            Batch<Q> sums;
            const float* x = queries.vectors + first * width;
            if (few)
                products<Q>(keys, slot, here, x, width, sums);
            else
                products_of_transposed<Q>(transposed, x, width, sums);
            each<Q>([&](auto q) {
                Floats s = mul(sums.of[q], all(a.scale));
                if (a.cap > 0.0f)
                    s = mul(hyperbolic_tangent(mul(s, all(1.0f / a.cap))), all(a.cap));
                const float* row_bias = bias + (first + q) / group * bias_stride + slot;
                if (here == kLanes) {
                    s = add(s, load(row_bias));
                } else {
                    float padded[kLanes];
                    for (size_t j = 0; j < kLanes; j++)
                        padded[j] = j < here ? row_bias[j] : -INFINITY;
                    s = add(s, load(padded));
                }
                store(scores + (first + q) * columns + slot, s);
                top[first + q] = std::max(top[first + q], across<max>(s));
            });
        };
        size_t first = 0;
        if (!few)
            for (; first + kQueries <= queries.count; first += kQueries)
                batch(std::integral_constant<int, kQueries>(), first);
        for (; first + 3 <= queries.count; first += 3)
            batch(std::integral_constant<int, 3>(), first);
        for (; first < queries.count; first++) batch(std::integral_constant<int, 1>(), first);
    }
}

// Scores to weights: e^(score - the query's largest), of `used` columns of the cache and the rows'.
inline void exponentials(Queries& queries, size_t used) {
    for (size_t q = 0; q < queries.count; q++) {
        const Floats top = all(queries.max[q]);
        float* scores = queries.scores + q * queries.columns;
        for (size_t i = 0; i < used; i += kLanes)
            store(scores + i, exponential(sub(load(scores + i), top)));
        for (size_t i = queries.cache_columns; i < queries.columns; i += kLanes)
            store(scores + i, exponential(sub(load(scores + i), top)));
    }
}

// Adds weights times values [count, Vectors * 16 from `i` on], and the weights themselves.
template <int Q, int Vectors, typename Values>
inline void gather(const Values& values, size_t count, size_t i, const float* weights,
                   size_t columns, Floats (*out)[Vectors], Floats* sums) {
    for (size_t slot = 0; slot < count; slot++) {
        Floats value[Vectors];
        each<Vectors>([&](auto v) { value[v] = values.at(slot, i + v * kLanes); });
        each<Q>([&](auto q) {
            const Floats weight = all(weights[q * columns + slot]);
            sums[q] = add(sums[q], weight);
            each<Vectors>([&](auto v) { out[q][v] = fma(weight, value[v], out[q][v]); });
        });
    }
}

// Values weighted and divided by the sums of weights, into `a.mixed`.
template <typename Number>
void mix_values(const Attention& a, const CacheHead<Number>& values, size_t used,
                const Queries& queries) {
    const size_t group = queries.group, columns = queries.columns, width = a.width;
    const PackedHead row_values{a.packed + a.value_offset + queries.kv_head * width,
                                a.packed_stride};
    const auto mix = [&](auto query_count, auto vector_count, size_t q, size_t i) {
        constexpr int Q = decltype(query_count)::value, V = decltype(vector_count)::value;
        Floats out[Q][V], sums[Q];
        each<Q>([&](auto j) {
            sums[j] = all(0.0f);
            if (a.sinks) {
                const float sink = a.sinks[queries.head + (q + j) % group];
                sums[j] = exponential(all(sink - queries.max[q + j]));
            }
            each<V>([&](auto v) { out[j][v] = all(0.0f); });
        });
        const float* weights = queries.scores + q * columns;
        gather<Q, V>(values, used, i, weights, columns, out, sums);
        if (a.row_columns)
            gather<Q, V>(row_values, a.row_columns, i, weights + queries.cache_columns, columns,
                         out, sums);
        each<Q>([&](auto j) {
            const size_t row = queries.from + (q + j) / group;
            const size_t head = queries.head + (q + j) % group;
            float* to = a.mixed + (row * a.heads + head) * width + i;
            each<V>([&](auto v) { store(to + v * kLanes, div(out[j][v], sums[j])); });
        });
    };
    const auto mix_all = [&](auto vector_count, size_t i) {
        size_t q = 0;
        for (; q + 3 <= queries.count; q += 3)
            mix(std::integral_constant<int, 3>(), vector_count, q, i);
        for (; q < queries.count; q++) mix(std::integral_constant<int, 1>(), vector_count, q, i);
    };
    size_t i = 0;
    for (; i + 4 * kLanes <= width; i += 4 * kLanes) mix_all(std::integral_constant<int, 4>(), i);
    for (; i < width; i += kLanes) mix_all(std::integral_constant<int, 1>(), i);
}

// Columns of the cache up to the last that any row sees: what none sees at its end is not read.
inline size_t seen_columns(const Attention& a, size_t from, size_t to) {
    size_t seen = 0;
    for (size_t row = from; row < to; row++) {
        const float* bias = a.bias + row * (a.used + a.row_columns);
        size_t last = a.used;
        while (last > seen && bias[last - 1] < kMasked) last--;
        seen = std::max(seen, last);
    }
    return seen;
}

template <typename Number>
void attend_over(const Attention& a, size_t first_head, size_t group, size_t from, size_t to,
                 float* scratch) {
    const size_t kv_head = first_head / (a.heads / a.kv_heads), width = a.width;
    Queries queries;
    queries.kv_head = kv_head;
    queries.head = first_head;
    queries.from = from;
    queries.group = group;
    queries.count = (to - from) * group;
    queries.cache_columns = round_up(a.used, kLanes);
    queries.columns = queries.cache_columns + round_up(a.row_columns, kLanes);
    queries.vectors = scratch;
    queries.scores = queries.vectors + queries.count * width;
    queries.transposed = queries.scores + queries.count * queries.columns;
    for (size_t q = 0; q < queries.count; q++)
        queries.max[q] = a.sinks ? a.sinks[first_head + q % group] : -INFINITY;
    for (size_t row = from; row < to; row++)
        for (size_t g = 0; g < group; g++)
            norm_and_rotate(a, a.packed + row * a.packed_stride + (first_head + g) * width, row,
                            a.query_norm, queries.vectors + ((row - from) * group + g) * width);
    const size_t used = seen_columns(a, from, to), head = kv_head * a.slots * width;
    const CacheHead<Number> keys{static_cast<const Number*>(a.keys) + head, width};
    const CacheHead<Number> values{static_cast<const Number*>(a.values) + head, width};
    constexpr size_t kPrefetched = 256;  // slots whose values are fetched while scores are computed
    for (size_t i = 0; i < std::min(used, kPrefetched) * width * sizeof(Number); i += 64)
        prefetch(reinterpret_cast<const char*>(values.base) + i);
    score(a, keys, used, queries, 0, 0);
    if (a.row_columns) {
        const CacheHead<float> row_keys{a.row_keys + kv_head * a.row_columns * width, width};
        score(a, row_keys, a.row_columns, queries, queries.cache_columns, a.used);
    }
    exponentials(queries, used);
    mix_values(a, values, used, queries);
}

void attend(const Attention& a, size_t head, size_t heads, size_t from, size_t to, float* scratch) {
    if (a.half)
        attend_over<uint16_t>(a, head, heads, from, to, scratch);
    else
        attend_over<float>(a, head, heads, from, to, scratch);
}

}  // namespace
}  // namespace streamspec::STREAMSPEC_ISA
