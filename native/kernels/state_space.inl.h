// The state space of Mamba-2 over rows of a tree, with the gate after it. Nothing is solved: what a
// row adds to the state is its own, so rows of one path are added up some at a time.
#pragma once

#include "kernels/recurrent_state.inl.h"

namespace streamspec::STREAMSPEC_ISA {
namespace {

// Keys and queries of all rows, and the products of these with the keys of columns.
inline void set_keys(const RecurrentState& d, const StateHead& h) {
    const size_t width = d.key_width, channel = h.key_head * width;
    const StateLayout at = layout_of(d);
    convolve(d, h, at.keys + channel, width, h.keeps, h.keys, width);
    convolve(d, h, at.queries + channel, width, h.keeps, h.vectors, width);
    set_products<1>(d, h);
}

inline void set_steps(const RecurrentState& d, const StateHead& h) {
    over_numbers(d, layout_of(d).steps + h.head, [&](size_t row, Floats x) {
        Floats step = softplus(add(x, all(d.decay_bias[h.head])));
        step = min(all(d.most), max(all(d.least), step));  // in this order, what is no number stays
        store(h.steps + row, step);
        store(h.logs + row, mul(step, all(d.decay_rate[h.head])));
    });
    set_weights<1>(d, h);
}

// Of Q rows, which others they see, and how they weigh these and themselves.
template <int Q>
struct Seen {
    const StateHead& h;
    const uint8_t* rows;
    const StateRow* of_rows[Q];
    float weights[Q][kStateBlock];
    size_t shared;  // rows that all see, and see first

    Seen(const RecurrentState& d, const StateHead& head, const uint8_t* chosen)
        : h(head), rows(chosen), shared(0) {
        for (int q = 0; q < Q; q++) {
            of_rows[q] = &d.of_rows[rows[q]];
            const float* of_columns = h.weights + rows[q] * h.columns + h.committed;
            for (size_t i = 0; i <= of_rows[q]->count; i++) weights[q][i] = of_columns[row(q, i)];
        }
        const auto same = [&](size_t i) {
            for (int q = 0; q < Q; q++)
                if (i >= of_rows[q]->count || row(q, i) != row(0, i)) return false;
            return true;
        };
        while (same(shared)) shared++;
    }
    size_t row(int q, size_t i) const {
        return i < of_rows[q]->count ? of_rows[q]->ancestors[i] : rows[q];
    }
};

// Adds what Q rows see of the call's to what they found before these.
template <int Q>
inline void add_seen(const RecurrentState& d, const StateHead& h, const uint8_t* rows) {
    const Seen<Q> seen(d, h, rows);
    over_columns<kStateVectors>(d.width, [&](auto vectors, size_t column) {
        constexpr int V = decltype(vectors)::value;
        const auto value = [&](int q, size_t i) {
            return h.value(d, d.values, h.committed + seen.row(q, i)) + column;
        };
        Floats sums[Q][V];
        const float* x[Q];
        each<Q>([&](auto q) {
            x[q] = seen.weights[q];
            each<V>([&](auto v) {
                sums[q][v] = load(h.sums + rows[q] * d.width + column + v * kLanes);
            });
        });
        add_rows<Q, V>([&](size_t i) { return value(0, i); }, seen.shared, x, sums);
        each<Q>([&](auto q) {
            const float* rest = x[q] + seen.shared;
            add_rows<1, V>([&](size_t i) { return value(q, seen.shared + i); },
                           seen.of_rows[q]->count + 1 - seen.shared, &rest, sums + q);
            each<V>([&](auto v) {
                store(h.sums + rows[q] * d.width + column + v * kLanes, sums[q][v]);
            });
        });
    });
}

// What each of `rows` adds to the state and returns, given what it found before the call's rows.
inline void add_values(const RecurrentState& d, const StateHead& h, const uint8_t* rows,
                       size_t count) {
    for (size_t at = 0; at < count; at++) {
        float* value = h.value(d, d.values, h.committed + rows[at]);
        const float* given = h.mixed + rows[at] * d.width;
        const Floats step = all(h.steps[rows[at]]);
        for (size_t i = 0; i < d.width; i += kLanes) store(value + i, mul(step, load(given + i)));
    }
    size_t at = 0;
    for (; at + kStateRows <= count; at += kStateRows) add_seen<kStateRows>(d, h, rows + at);
    for (; at < count; at++) add_seen<1>(d, h, rows + at);
}

// What queries have found and what skips the state, times the gates.
inline void leave_gated(const RecurrentState& d, const StateHead& h) {
    const Floats skip = all(d.skip[h.head]);
    for (size_t row = 0; row < d.rows; row++) {
        const float* gate =
            d.packed + row * packed_width(d) + layout_of(d).gates + h.head * d.width;
        const float *found = h.sums + row * d.width, *given = h.mixed + row * d.width;
        float* y = d.mixed + (row * d.heads + h.head) * d.width;
        for (size_t i = 0; i < d.width; i += kLanes)
            store(y + i, mul(fma(skip, load(given + i), load(found + i)),
                             activated(Activation::kSilu, load(gate + i))));
    }
}

void state_space(const RecurrentState& d, size_t from, size_t to, float* scratch) {
    const size_t group = d.heads / d.key_heads;
    StateHead h = head_of(d, from / group, 1, scratch);
    h.keeps = from % group == 0;
    set_keys(d, h);
    for (h.head = from; h.head < to; h.head++) {
        convolve(d, h, layout_of(d).values + h.head * d.width, d.width, true, h.mixed, d.width);
        set_steps(d, h);
        run_rows<1>(d, h,
                    [&](const uint8_t* rows, size_t count) { add_values(d, h, rows, count); });
        leave_gated(d, h);
    }
}

}  // namespace
}  // namespace streamspec::STREAMSPEC_ISA
