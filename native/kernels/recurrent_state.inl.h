// Layers with a recurrent state over rows of a tree: what all their rules share. The short
// convolution before them, rings of rows, states after blocks, and what rows find in both.
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

// Heads of one key head at work, one after the other. Columns are the committed rows of the call's
// first block, then the call's rows. Sides: key and query, or the query alone where nothing is
// solved.
struct StateHead {
    size_t key_head, head, sides;
    bool keeps;        // whether it keeps keys and inputs of the key head
    size_t first;      // slot of the first column
    size_t committed;  // columns before the call's rows
    size_t columns;    // of a row of products and weights, whole vectors
    float* vectors;    // [rows, sides, key_width]: keys and queries
    float* keys;       // of the call's rows, `key_stride` apart
    size_t key_stride;
    float* products;      // [rows, sides, columns]: of both with the keys of columns
    float* weights;       // [rows, sides, columns]: the same, decayed
    float* sums;          // [rows, sides, width]: what key and query find; then values
    float* mixed;         // [rows, width]: inputs of the head's values
    float* faded;         // [key_width, kStateBlock]: keys of a block, decayed to its end
    float* state;         // [key_width, width]: after the block that ends among the call's rows
    float *logs, *steps;  // [rows]
    double* totals;  // [columns]: of the logarithms from the first token of a column's block on

    size_t slot(const RecurrentState& d, size_t column) const {
        const size_t at = first + column;
        return at < d.slots ? at : at - d.slots;
    }
    const float* key(const RecurrentState& d, size_t column) const {
        if (column >= committed) return keys + (column - committed) * key_stride;
        return d.keys + (key_head * d.slots + slot(d, column)) * d.key_width;
    }
    float* value(const RecurrentState& d, float* ring, size_t column) const {
        return ring + (head * d.slots + slot(d, column)) * d.width;
    }
};

inline StateHead head_of(const RecurrentState& d, size_t key_head, size_t sides, float* scratch) {
    StateHead h{};
    h.key_head = key_head;
    h.sides = sides;
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
    h.vectors = take(sides * d.rows * d.key_width);
    h.keys = sides == 2 ? h.vectors : take(d.rows * d.key_width);
    h.key_stride = sides * d.key_width;
    h.products = take(sides * d.rows * h.columns);
    h.weights = take(sides * d.rows * h.columns);
    h.sums = take(sides * d.rows * d.width);
    h.mixed = take(d.rows * d.width);
    h.logs = take(rows);
    h.steps = take(rows);
    h.faded = take(d.key_width * kStateBlock);
    h.state = take(d.key_width * d.width);
    return h;
}

struct ColumnKeys {
    const RecurrentState& d;
    const StateHead& h;
    Floats at(size_t column, size_t i) const { return load(h.key(d, column) + i); }
};

// Keeps `width` inputs of all rows, from `channel` on, where it `keeps` them, and convolves them: y
// [rows, .. stride].
inline void convolve(const RecurrentState& d, const StateHead& h, size_t channel, size_t width,
                     bool keeps, float* y, size_t stride) {
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
            if (d.taps_bias) sum = add(sum, load(d.taps_bias + channel + i));
            if (keeps) store(kept + i, own);
            store(y + row * stride + i, activated(Activation::kSilu, sum));
        }
    }
}

// Keeps the keys of all rows, and computes the products of all sides with the keys of columns up to
// the row's own.
template <size_t Sides>
inline void set_products(const RecurrentState& d, const StateHead& h) {
    const size_t width = d.key_width;
    for (size_t row = 0; h.keeps && row < d.rows; row++) {
        const size_t slot = h.slot(d, h.committed + row);
        std::memcpy(d.keys + (h.key_head * d.slots + slot) * width, h.key(d, h.committed + row),
                    width * sizeof(float));
    }
    const auto multiply_rows = [&](auto count, size_t row) {
        constexpr int R = decltype(count)::value, Q = R * static_cast<int>(Sides);
        const size_t end = h.committed + row + R;
        for (size_t column = 0; column < end; column += kLanes) {
            Batch<Q> found;
            products<Q>(ColumnKeys{d, h}, column, std::min(kLanes, end - column),
                        h.vectors + row * Sides * width, width, found);
            each<Q>([&](auto q) {
                store(h.products + (Sides * row + q) * h.columns + column, found.of[q]);
            });
        }
    };
    constexpr int kMany = 4 / Sides;
    size_t row = 0;
    for (; row + kMany <= d.rows; row += kMany)
        multiply_rows(std::integral_constant<int, kMany>(), row);
    for (; row < d.rows; row++) multiply_rows(std::integral_constant<int, 1>(), row);
}

// Calls body(first row, x) for 16 rows at a time, x their numbers at `offset` of packed rows.
template <typename Body>
inline void over_numbers(const RecurrentState& d, size_t offset, const Body& body) {
    const float* packed = d.packed + offset;
    const size_t stride = packed_width(d);
    for (size_t first = 0; first < d.rows; first += kLanes) {
        float x[kLanes] = {};
        for (size_t i = 0; i < std::min(kLanes, d.rows - first); i++)
            x[i] = packed[(first + i) * stride];
        body(first, load(x));
    }
}

// Keeps decays and steps of all rows, and computes the weights that their sums give to the rows
// that each sees.
template <size_t Sides>
inline void set_weights(const RecurrentState& d, const StateHead& h) {
    double total = 0.0;
    for (size_t column = 0; column < h.committed; column++)
        h.totals[column] = total +=
            static_cast<double>(d.decays[h.slot(d, column) * 2 * d.heads + h.head]);
    for (size_t row = 0; row < d.rows; row++) {
        const StateRow& seen = d.of_rows[row];
        const size_t own = h.committed + row;
        float* kept = d.decays + h.slot(d, own) * 2 * d.heads + h.head;
        kept[0] = h.logs[row];
        kept[d.heads] = h.steps[row];
        const double before = seen.count ? h.totals[h.committed + seen.ancestors[seen.count - 1]]
                              : seen.base < 0 && h.committed ? h.totals[h.committed - 1]
                                                             : 0.0;
        h.totals[own] = before + static_cast<double>(h.logs[row]);
        const float* from = h.products + Sides * row * h.columns;
        float* to = h.weights + Sides * row * h.columns;
        for (size_t column = 0; column <= own; column += kLanes) {
            float since[kLanes];
            for (size_t i = 0; i < kLanes; i++)
                since[i] = static_cast<float>(h.totals[own] - h.totals[column + i]);
            const Floats fading = exponential(load(since));
            for (size_t side = 0; side < Sides; side++)
                store(to + side * h.columns + column,
                      mul(load(from + side * h.columns + column), fading));
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

// Calls body(vectors, first column) for all columns of a width, as many vectors as there are.
template <int V, typename Body>
inline void over_columns(size_t width, const Body& body, size_t i = 0) {
    for (; i + V * kLanes <= width; i += V * kLanes) body(std::integral_constant<int, V>(), i);
    if constexpr (V > 1) over_columns<V / 2>(width, body, i);
}

// The state after a block of rows with these keys and values: [key_width, width], from the one
// before it, or none.
inline void add_block(const RecurrentState& d, const StateHead& h, const float* before,
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

// What all sides of `rows` find in the state that they start from, or none, and in the
// `committed` rows since: into `sums`.
template <size_t Sides>
inline void find(const RecurrentState& d, const StateHead& h, const float* state, size_t committed,
                 const uint8_t* rows, size_t count) {
    const bool once = Sides * count <= kStateRows;  // whether the state is read once
    const auto batch = [&](auto size, auto vectors, size_t first, size_t column) {
        constexpr int Q = decltype(size)::value, V = decltype(vectors)::value;
        Floats sums[Q][V];
        const float *x[Q], *weights[Q];
        each<Q>([&](auto q) {
            const size_t row = rows[(first + q) / Sides], side = (first + q) % Sides;
            x[q] = h.vectors + (Sides * row + side) * d.key_width;
            weights[q] = h.weights + (Sides * row + side) * h.columns;
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
                const double total = h.totals[h.committed + rows[(first + q) / Sides]];
                const Floats fading = exponential(all(static_cast<float>(total)));
                each<V>([&](auto v) { sums[q][v] = mul(fading, sums[q][v]); });
            });
        }
        // Columns of a block's begin do not wrap.
        const float* values = h.value(d, d.values, 0) + column;
        add_rows<Q, V>([&](size_t i) { return values + i * d.width; }, committed, weights, sums);
        each<Q>([&](auto q) {
            float* to = h.sums +
                        (Sides * rows[(first + q) / Sides] + (first + q) % Sides) * d.width +
                        column;
            each<V>([&](auto v) { store(to + v * kLanes, sums[q][v]); });
        });
    };
    size_t first = 0;
    const auto batches = [&](auto size) {
        constexpr int Q = decltype(size)::value;
        constexpr int V = std::min(kStateVectors * kStateRows / Q, 2 * kStateVectors);
        for (; first + Q <= Sides * count; first += Q)
            over_columns<V>(
                d.width, [&](auto vectors, size_t column) { batch(size, vectors, first, column); });
    };
    batches(std::integral_constant<int, kStateRows>());
    batches(std::integral_constant<int, 2>());
    if constexpr (Sides == 1) batches(std::integral_constant<int, 1>());
}

// The state that the call's first block starts from; null before it. Computes it where it is due.
inline const float* begin(const RecurrentState& d, const StateHead& h) {
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
inline void follow(const RecurrentState& d, const StateHead& h, const float* before, size_t last) {
    const float *keys[kStateBlock], *values[kStateBlock];
    double totals[kStateBlock];
    const StateRow& seen = d.of_rows[last];
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

// Finds what all rows find, block after block, and has `add(rows, count)` add them to the state.
template <size_t Sides, typename Add>
inline void run_rows(const RecurrentState& d, const StateHead& h, const Add& add) {
    uint8_t chosen[kStateBlock];
    const auto run = [&](const float* state, size_t committed, int base) {
        size_t count = 0;
        for (size_t row = 0; row < d.rows; row++)
            if (d.of_rows[row].base == base) chosen[count++] = static_cast<uint8_t>(row);
        find<Sides>(d, h, state, committed, chosen, count);
        add(chosen, count);
    };
    const float* state = begin(d, h);
    run(state, h.committed, -1);
    for (size_t row = 0; row < d.rows; row++)
        if (d.of_rows[row].continued) {
            follow(d, h, state, row);
            run(h.state, 0, static_cast<int>(row));
        }
}

}  // namespace
}  // namespace streamspec::STREAMSPEC_ISA
