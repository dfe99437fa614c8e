// The gated delta rule over rows of a tree, with the gated norm after it.
#pragma once

#include "kernels/recurrent_state.inl.h"

namespace streamspec::STREAMSPEC_ISA {
namespace {

// x [width] over the root of its sum of squares, times `length`.
inline void set_length(float* x, size_t width, float length) {
    constexpr float kEps = 1e-6f;  // as transformers has it
    Floats squares = all(0.0f);
    for (size_t i = 0; i < width; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    const Floats factor = all(length / std::sqrt(across<add>(squares) + kEps));
    for (size_t i = 0; i < width; i += kLanes) store(x + i, mul(load(x + i), factor));
}

// Unit keys and queries of all rows, and their products with the keys of columns.
inline void set_unit_keys(const RecurrentState& d, const StateHead& h) {
    const size_t width = d.key_width, channel = h.key_head * width, stride = 2 * width;
    const StateLayout at = layout_of(d);
    convolve(d, h, at.keys + channel, width, h.keeps, h.vectors, stride);
    convolve(d, h, at.queries + channel, width, h.keeps, h.vectors + width, stride);
    for (size_t row = 0; row < d.rows; row++) {
        float* key = h.vectors + row * stride;
        set_length(key, width, 1.0f);
        set_length(key + width, width, 1.0f / std::sqrt(static_cast<float>(width)));
    }
    set_products<2>(d, h);
}

inline void set_gates(const RecurrentState& d, const StateHead& h) {
    const StateLayout at = layout_of(d);
    over_numbers(d, at.steps + h.head, [&](size_t row, Floats x) {
        store(h.steps + row, mul(all(d.largest_step), sigmoid(x)));
    });
    over_numbers(d, at.steps + d.heads + h.head, [&](size_t row, Floats x) {
        const Floats decay = softplus(add(x, all(d.decay_bias[h.head])));
        store(h.logs + row, mul(decay, all(d.decay_rate[h.head])));
    });
    set_weights<2>(d, h);
}

// What each of `rows` adds to the state and returns, given what it found before the call's rows.
inline void solve(const RecurrentState& d, const StateHead& h, const uint8_t* rows, size_t count) {
    over_columns<kStateVectors>(d.width, [&](auto vectors, size_t i) {
        constexpr int V = decltype(vectors)::value;
        for (size_t at = 0; at < count; at++) {
            const size_t row = rows[at], own = h.committed + row;
            const StateRow& seen = d.of_rows[row];
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
inline void leave(const RecurrentState& d, const StateHead& h) {
    for (size_t row = 0; row < d.rows; row++) {
        const float* gate =
            d.packed + row * packed_width(d) + layout_of(d).gates + h.head * d.width;
        float* y = d.mixed + (row * d.heads + h.head) * d.width;
        norm(h.sums + (2 * row + 1) * d.width, nullptr, d.norm, d.eps, d.width, 0, 1, nullptr, y);
        for (size_t i = 0; i < d.width; i += kLanes)
            store(y + i, mul(load(y + i), activated(Activation::kSilu, load(gate + i))));
    }
}

void delta_rule(const RecurrentState& d, size_t from, size_t to, float* scratch) {
    const size_t group = d.heads / d.key_heads;
    StateHead h = head_of(d, from / group, 2, scratch);
    h.keeps = from % group == 0;
    set_unit_keys(d, h);
    for (h.head = from; h.head < to; h.head++) {
        convolve(d, h, layout_of(d).values + h.head * d.width, d.width, true, h.mixed, d.width);
        set_gates(d, h);
        run_rows<2>(d, h, [&](const uint8_t* rows, size_t count) { solve(d, h, rows, count); });
        leave(d, h);
    }
}

}  // namespace
}  // namespace streamspec::STREAMSPEC_ISA
