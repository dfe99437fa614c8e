// The gated delta rule over rows of a tree, with the short convolution before it and the gated norm
// after it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/attention.inl.h"

namespace streamspec::STREAMSPEC_ISA {
namespace {

constexpr int kStateRows = kQueries >= 6 ? 4 : 2;     // products with a matrix at a time
constexpr int kStateVectors = kQueries >= 6 ? 4 : 2;  // and vectors of its columns

// log(1 + e^x). log(1 + y) = 2 (z + z^3 / 3 + z^5 / 5 + ..) with z = y / (2 + y), at most 1 / 3.
inline Floats softplus(Floats x) {
    const Floats above = relu(x), y = exponential(sub(sub(x, above), above));
    const Floats z = div(y, add(y, all(2.0f))), square = mul(z, z);
    Floats total = all(2.0f / 15.0f);
    for (int odd = 13; odd > 0; odd -= 2)
        total = fma(total, square, all(2.0f / static_cast<float>(odd)));
    return fma(z, total, above);
}

// A head at work. Columns are the committed rows of the call's first block, then the call's rows.
struct DeltaHead {
    size_t key_head, head;
    size_t first;         // slot of the first column
    size_t committed;     // columns before the call's rows
    size_t columns;       // of a row of products and weights, whole vectors
    float* vectors;       // [rows, 2, key_width]: keys and queries
    float* products;      // [rows, 2, columns]: of both with the keys of columns
    float* weights;       // [rows, 2, columns]: the same, decayed
    float* sums;          // [rows, 2, width]: what key and query find; then values
    float* mixed;         // [rows, width]: inputs of the head's values
    float* faded;         // [key_width, kStateBlock]: keys of a block, decayed to its end
    float* state;         // [key_width, width]: after the block that ends among the call's rows
    float *logs, *steps;  // [rows]
    double* totals;  // [columns]: of the logarithms from the first token of a column's block on

    size_t slot(const DeltaRule& d, size_t column) const {
        const size_t at = first + column;
        return at < d.slots ? at : at - d.slots;
    }
    const float* key(const DeltaRule& d, size_t column) const {
        return d.keys + (key_head * d.slots + slot(d, column)) * d.key_width;
    }
    float* value(const DeltaRule& d, float* ring, size_t column) const {
        return ring + (head * d.slots + slot(d, column)) * d.width;
    }
};

struct ColumnKeys {
    const DeltaRule& d;
    const DeltaHead& h;
    Floats at(size_t column, size_t i) const { return load(h.key(d, column) + i); }
};

// Keeps `width` inputs of all rows, from `channel` on, and convolves them: y [rows, .. stride].
inline void convolve(const DeltaRule& d, const DeltaHead& h, size_t channel, size_t width, float* y,
                     size_t stride) {
    for (size_t row = 0; row < d.rows; row++) {
        const float* const* sources = d.of_rows[row].sources;
        float* kept = d.inputs + h.slot(d, h.committed + row) * channels_of(d) + channel;
        for (size_t i = 0; i < width; i += kLanes) {
            const Floats own = load(sources[0] + channel + i);
            Floats sum = mul(load(d.taps[0] + channel + i), own);
            for (size_t tap = 1; tap < d.tap_count; tap++)
                if (sources[tap])
                    sum =
                        fma(load(d.taps[tap] + channel + i), load(sources[tap] + channel + i), sum);
            store(kept + i, own);
            store(y + row * stride + i, activated(Activation::kSilu, sum));
        }
    }
}

// x [width] over the root of its sum of squares, times `length`.
inline void set_length(float* x, size_t width, float length) {
    constexpr float kEps = 1e-6f;  // as transformers has it
    Floats squares = all(0.0f);
    for (size_t i = 0; i < width; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    const Floats factor = all(length / std::sqrt(across<add>(squares) + kEps));
    for (size_t i = 0; i < width; i += kLanes) store(x + i, mul(load(x + i), factor));
}

// Keys and queries of all rows, and their products with the keys of columns up to the row's own.
inline void set_keys(const DeltaRule& d, const DeltaHead& h) {
    const size_t width = d.key_width, channel = h.key_head * width, stride = 2 * width;
    convolve(d, h, d.key_heads * width + channel, width, h.vectors, stride);
    convolve(d, h, channel, width, h.vectors + width, stride);
    for (size_t row = 0; row < d.rows; row++) {
        float* key = h.vectors + row * stride;
        set_length(key, width, 1.0f);
        set_length(key + width, width, 1.0f / std::sqrt(static_cast<float>(width)));
        std::memcpy(const_cast<float*>(h.key(d, h.committed + row)), key, width * sizeof(float));
    }
    const auto multiply_rows = [&](auto count, size_t row) {
        constexpr int Q = 2 * decltype(count)::value;
        const size_t end = h.committed + row + Q / 2;
        for (size_t column = 0; column < end; column += kLanes) {
            Batch<Q> found;
            products<Q>(ColumnKeys{d, h}, column, std::min(kLanes, end - column),
                        h.vectors + row * stride, width, found);
            each<Q>([&](auto q) {
                store(h.products + (2 * row + q) * h.columns + column, found.of[q]);
            });
        }
    };
    size_t row = 0;
    for (; row + 2 <= d.rows; row += 2) multiply_rows(std::integral_constant<int, 2>(), row);
    for (; row < d.rows; row++) multiply_rows(std::integral_constant<int, 1>(), row);
}

// Decays and steps of all rows, and the weights that their sums give to the rows that each sees.
inline void set_weights(const DeltaRule& d, const DeltaHead& h) {
    const size_t stride = packed_width(d);
    const float* packed = d.packed + stride - 2 * d.heads + h.head;
    for (size_t first = 0; first < d.rows; first += kLanes) {
        float steps[kLanes] = {}, decays[kLanes] = {};
        for (size_t i = 0; i < std::min(kLanes, d.rows - first); i++) {
            steps[i] = packed[(first + i) * stride];
            decays[i] = packed[(first + i) * stride + d.heads];
        }
        const Floats decay = softplus(add(load(decays), all(d.decay_bias[h.head])));
        store(h.logs + first, mul(decay, all(d.decay_rate[h.head])));
        store(h.steps + first, mul(all(d.largest_step), sigmoid(load(steps))));
    }
    double total = 0.0;
    for (size_t column = 0; column < h.committed; column++)
        h.totals[column] = total +=
            static_cast<double>(d.decays[h.slot(d, column) * 2 * d.heads + h.head]);
    for (size_t row = 0; row < d.rows; row++) {
        const DeltaRow& seen = d.of_rows[row];
        const size_t own = h.committed + row;
        float* kept = d.decays + h.slot(d, own) * 2 * d.heads + h.head;
        kept[0] = h.logs[row];
        kept[d.heads] = h.steps[row];
        const double before = seen.count ? h.totals[h.committed + seen.ancestors[seen.count - 1]]
                              : seen.base < 0 && h.committed ? h.totals[h.committed - 1]
                                                             : 0.0;
        h.totals[own] = before + static_cast<double>(h.logs[row]);
        const float* from = h.products + 2 * row * h.columns;
        float* to = h.weights + 2 * row * h.columns;
        for (size_t column = 0; column <= own; column += kLanes) {
            float since[kLanes];
            for (size_t i = 0; i < kLanes; i++)
                since[i] = static_cast<float>(h.totals[own] - h.totals[column + i]);
            const Floats fading = exponential(load(since));
            store(to + column, mul(load(from + column), fading));
            store(to + h.columns + column, mul(load(from + h.columns + column), fading));
        }
    }
}

inline void prefetch_ahead(const float* p) { prefetch(reinterpret_cast<const char*>(p) + kAhead); }

// Adds numbers x[q][0..count) times rows(0..count) of a matrix, 16 V of its columns.
template <int Q, int V, typename MatrixRows>
STREAMSPEC_INLINE void add_rows(const MatrixRows& rows, size_t count, const float* const* x,
                                Floats (*out)[V]) {
    for (size_t i = 0; i < count; i++) {
        const float* row = rows(i);
        Floats values[V];
        each<V>([&](auto v) { values[v] = load(row + v * kLanes); });
        each<Q>([&](auto q) {
            const Floats factor = all(x[q][i]);
            each<V>([&](auto v) { out[q][v] = fma(factor, values[v], out[q][v]); });
        });
    }
}

// Calls body(vectors, first column) for all columns of a width.
template <int V, typename Body>
inline void over_columns(size_t width, const Body& body) {
    size_t i = 0;
    for (; i + V * kLanes <= width; i += V * kLanes) body(std::integral_constant<int, V>(), i);
    for (; i < width; i += kLanes) body(std::integral_constant<int, 1>(), i);
}

// The state after a block of rows with these keys and values: [key_width, width], from the one
// before it, or none.
inline void add_block(const DeltaRule& d, const DeltaHead& h, const float* before,
                      const float* const* keys, const float* const* values, const double* totals,
                      float* state) {
    const double end = totals[kStateBlock - 1];
    float since[kStateBlock], factors[kStateBlock];
    for (size_t j = 0; j < kStateBlock; j++) since[j] = static_cast<float>(end - totals[j]);
    for (size_t j = 0; j < kStateBlock; j += kLanes)
        store(factors + j, exponential(load(since + j)));
    for (size_t j = 0; j < kStateBlock; j += kLanes)
        for (size_t i = 0; i < d.key_width; i += kLanes) {
            Floats rows[kLanes];
            float turned[kLanes * kLanes];
            for (size_t k = 0; k < kLanes; k++)
                rows[k] = mul(load(keys[j + k] + i), all(factors[j + k]));
            transpose(rows, turned);
            for (size_t k = 0; k < kLanes; k++)
                store(h.faded + (i + k) * kStateBlock + j, load(turned + k * kLanes));
        }
    const Floats fading = exponential(all(static_cast<float>(end)));
    over_columns<kStateVectors>(d.width, [&](auto vectors, size_t column) {
        constexpr int V = decltype(vectors)::value;
        for (size_t i = 0; i < d.key_width; i += kStateRows) {
            Floats sums[kStateRows][V];
            const float* x[kStateRows];
            each<kStateRows>([&](auto q) {
                x[q] = h.faded + (i + q) * kStateBlock;
                each<V>([&](auto v) {
                    sums[q][v] =
                        before ? mul(fading, load(before + (i + q) * d.width + column + v * kLanes))
                               : all(0.0f);
                });
            });
            add_rows<kStateRows, V>([&](size_t j) { return values[j] + column; }, kStateBlock, x,
                                    sums);
            each<kStateRows>([&](auto q) {
                each<V>([&](auto v) {
                    store(state + (i + q) * d.width + column + v * kLanes, sums[q][v]);
                });
            });
        }
    });
}

// What keys and queries of `rows` find in the state that they start from, or none, and in the
// `committed` rows since: into `sums`.
inline void find(const DeltaRule& d, const DeltaHead& h, const float* state, size_t committed,
                 const uint8_t* rows, size_t count) {
    const bool once = 2 * count <= kStateRows;  // whether the state is read once
    const auto batch = [&](auto size, auto vectors, size_t first, size_t column) {
        constexpr int Q = decltype(size)::value, V = decltype(vectors)::value;
        Floats sums[Q][V];
        const float *x[Q], *weights[Q];
        each<Q>([&](auto q) {
            const size_t row = rows[(first + q) / 2], side = (first + q) % 2;
            x[q] = h.vectors + (2 * row + side) * d.key_width;
            weights[q] = h.weights + (2 * row + side) * h.columns;
            each<V>([&](auto v) { sums[q][v] = all(0.0f); });
        });
        if (state) {
            const auto row_of = [&](size_t i) {
                const float* row = state + i * d.width + column;
                if (once) each<V>([&](auto v) { prefetch_ahead(row + v * kLanes); });
                return row;
            };
            add_rows<Q, V>(row_of, d.key_width, x, sums);
            each<Q>([&](auto q) {
                const double total = h.totals[h.committed + rows[(first + q) / 2]];
                const Floats fading = exponential(all(static_cast<float>(total)));
                each<V>([&](auto v) { sums[q][v] = mul(fading, sums[q][v]); });
            });
        }
        // Columns of a block's begin do not wrap.
        const float* values = h.value(d, d.values, 0) + column;
        add_rows<Q, V>([&](size_t i) { return values + i * d.width; }, committed, weights, sums);
        each<Q>([&](auto q) {
            float* to = h.sums + (2 * rows[(first + q) / 2] + (first + q) % 2) * d.width + column;
            each<V>([&](auto v) { store(to + v * kLanes, sums[q][v]); });
        });
    };
    size_t first = 0;
    const auto batches = [&](auto size) {
        constexpr int Q = decltype(size)::value;
        for (; first + Q <= 2 * count; first += Q)
            over_columns<kStateVectors * kStateRows / Q>(
                d.width, [&](auto vectors, size_t column) { batch(size, vectors, first, column); });
    };
    batches(std::integral_constant<int, kStateRows>());
    batches(std::integral_constant<int, 2>());
}

// What each of `rows` adds to the state and returns, given what it found before the call's rows.
inline void solve(const DeltaRule& d, const DeltaHead& h, const uint8_t* rows, size_t count) {
    over_columns<kStateVectors>(d.width, [&](auto vectors, size_t i) {
        constexpr int V = decltype(vectors)::value;
        for (size_t at = 0; at < count; at++) {
            const size_t row = rows[at], own = h.committed + row;
            const DeltaRow& seen = d.of_rows[row];
            const float* weights = h.weights + 2 * row * h.columns;
            float* found = h.sums + 2 * row * d.width + i;
            const float* factors[2] = {weights + h.committed, weights + h.columns + h.committed};
            Floats sums[2][V], in_run[V], added[V];
            each<V>([&](auto v) {
                sums[0][v] = load(found + v * kLanes);
                sums[1][v] = load(found + d.width + v * kLanes);
                in_run[v] = all(0.0f);
            });
            for (size_t j = 0; j < seen.count; j++) {
                const size_t other = seen.ancestors[j];
                const float* value = h.value(d, d.values, h.committed + other) + i;
                const Floats key = all(factors[0][other]), query = all(factors[1][other]);
                each<V>([&](auto v) {
                    const Floats x = load(value + v * kLanes);
                    sums[0][v] = fma(key, x, sums[0][v]);
                    sums[1][v] = fma(query, x, sums[1][v]);
                });
            }
            const auto add_in_run = [&](size_t column) {
                const float* value = h.value(d, d.values, column) + i;
                const Floats key = all(weights[column]);
                each<V>([&](auto v) { in_run[v] = fma(key, load(value + v * kLanes), in_run[v]); });
            };
            for (size_t column = h.committed - seen.committed_in_run; column < h.committed;
                 column++)
                add_in_run(column);
            for (size_t j = seen.count - seen.in_run; j < seen.count; j++)
                add_in_run(h.committed + seen.ancestors[j]);
            const Floats step = all(h.steps[row]), query = all(factors[1][row]);
            float *value = h.value(d, d.values, own) + i, *update = h.value(d, d.updates, own) + i;
            each<V>([&](auto v) {
                const Floats given = load(h.mixed + row * d.width + i + v * kLanes);
                added[v] = mul(step, sub(given, sums[0][v]));
                store(value + v * kLanes, added[v]);
                store(update + v * kLanes, fma(step, in_run[v], added[v]));
                store(found + d.width + v * kLanes, fma(query, added[v], sums[1][v]));
            });
        }
    });
}

// The norm of what queries have found, times their gates.
inline void leave(const DeltaRule& d, const DeltaHead& h) {
    for (size_t row = 0; row < d.rows; row++) {
        const float* gate = d.packed + row * packed_width(d) + channels_of(d) + h.head * d.width;
        float* y = d.mixed + (row * d.heads + h.head) * d.width;
        norm(h.sums + (2 * row + 1) * d.width, nullptr, d.norm, d.eps, d.width, 0, 1, nullptr, y);
        for (size_t i = 0; i < d.width; i += kLanes)
            store(y + i, mul(load(y + i), activated(Activation::kSilu, load(gate + i))));
    }
}

// The state that the call's first block starts from; null before it. Computes it where it is due.
inline const float* begin(const DeltaRule& d, const DeltaHead& h) {
    const size_t block = d.past_length / kStateBlock, size = d.key_width * d.width;
    if (block == 0) return nullptr;
    const auto slot_of = [&](size_t number) { return number * kStateBlock % d.slots; };
    const auto state_of = [&](size_t number) {
        return d.states + slot_of(number) * (d.heads * size / kStateBlock) + h.head * size;
    };
    float* newest = state_of(block - 1);
    if (!d.due) return newest;
    const float *keys[kStateBlock], *values[kStateBlock];
    double totals[kStateBlock], total = 0.0;
    for (size_t i = 0; i < kStateBlock; i++) {
        const size_t slot = slot_of(block - 1) + i;
        keys[i] = d.keys + (h.key_head * d.slots + slot) * d.key_width;
        values[i] = d.values + (h.head * d.slots + slot) * d.width;
        totals[i] = total += static_cast<double>(d.decays[slot * 2 * d.heads + h.head]);
    }
    add_block(d, h, block > 1 ? state_of(block - 2) : nullptr, keys, values, totals, newest);
    return newest;
}

// The state after the block that ends with row `last` of the call.
inline void follow(const DeltaRule& d, const DeltaHead& h, const float* before, size_t last) {
    const float *keys[kStateBlock], *values[kStateBlock];
    double totals[kStateBlock];
    const DeltaRow& seen = d.of_rows[last];
    for (size_t i = 0; i < kStateBlock; i++) {
        const size_t row = i - h.committed;
        const size_t column = i < h.committed    ? i
                              : row < seen.count ? h.committed + seen.ancestors[row]
                                                 : h.committed + last;
        keys[i] = h.key(d, column);
        values[i] = h.value(d, d.values, column);
        totals[i] = h.totals[column];
    }
    add_block(d, h, before, keys, values, totals, h.state);
}

void delta_rule(const DeltaRule& d, size_t key_head, float* scratch) {
    DeltaHead h{};
    h.key_head = key_head;
    h.first = d.past_length / kStateBlock * kStateBlock % d.slots;
    h.committed = d.past_length % kStateBlock;
    h.columns = round_up(h.committed + d.rows, kLanes);
    const size_t rows = round_up(d.rows, kLanes);
    const auto take = [&](size_t floats) {
        float* out = scratch;
        scratch += floats;
        return out;
    };
    h.totals = reinterpret_cast<double*>(take(2 * h.columns));
    std::fill(h.totals, h.totals + h.columns, 0.0);
    h.vectors = take(2 * d.rows * d.key_width);
    h.products = take(2 * d.rows * h.columns);
    h.weights = take(2 * d.rows * h.columns);
    h.sums = take(2 * d.rows * d.width);
    h.mixed = take(d.rows * d.width);
    h.logs = take(rows);
    h.steps = take(rows);
    h.faded = take(d.key_width * kStateBlock);
    h.state = take(d.key_width * d.width);

    uint8_t chosen[kStateBlock];
    const auto run = [&](const float* state, size_t committed, int base) {
        size_t count = 0;
        for (size_t row = 0; row < d.rows; row++)
            if (d.of_rows[row].base == base) chosen[count++] = static_cast<uint8_t>(row);
        find(d, h, state, committed, chosen, count);
        solve(d, h, chosen, count);
    };
    set_keys(d, h);
    const size_t group = d.heads / d.key_heads, values = 2 * d.key_heads * d.key_width;
    for (h.head = key_head * group; h.head < (key_head + 1) * group; h.head++) {
        convolve(d, h, values + h.head * d.width, d.width, h.mixed, d.width);
        set_weights(d, h);
        const float* state = begin(d, h);
        run(state, h.committed, -1);
        for (size_t row = 0; row < d.rows; row++)
            if (d.of_rows[row].continued) {
                follow(d, h, state, row);
                run(h.state, 0, static_cast<int>(row));
            }
        leave(d, h);
    }
}

}  // namespace
}  // namespace streamspec::STREAMSPEC_ISA
