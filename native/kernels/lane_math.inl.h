// Functions of 16 lanes: exponentials, activations, Hadamard blocks, and reductions to a number.
#pragma once

#include <utility>

#include "kernels/kernels.h"

// Where a call would pass vectors through memory: GCC 12 makes calls of what many functions use.
#if defined(_MSC_VER) && !defined(__clang__)
#define STREAMSPEC_INLINE __forceinline
#else
#define STREAMSPEC_INLINE inline __attribute__((always_inline))
#endif

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

// e^x, for x up to 88; exactly 0 below -87; no number of none. Cody and Waite's reduction, Cephes'
// polynomial: within 2 ulp.
inline Floats exponential(Floats x) {
    const Floats low = all(-87.0f);
    // In this order, what is no number stays so.
    const Floats bounded = max(low, min(all(88.0f), x));
    const Ints n = nearest(mul(bounded, all(1.44269504f)));
    const Floats multiple = to_floats(n);
    Floats r = fnma(multiple, all(0.693359375f), bounded);
    r = fnma(multiple, all(-2.12194440e-4f), r);
    Floats p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), all(1.0f));
    return zero_where_less(x, low, mul(p, power_of_two(n)));
}

inline Floats sigmoid(Floats x) {
    return div(all(1.0f), add(all(1.0f), exponential(sub(all(0.0f), x))));
}

inline Floats hyperbolic_tangent(Floats x) {  // 2 sigmoid(2 x) - 1
    return fma(all(2.0f), sigmoid(add(x, x)), all(-1.0f));
}

inline Floats relu(Floats x) { return max(all(0.0f), x); }  // in this order, as above

inline Floats gelu_tanh(Floats x) {  // x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))
    const Floats cubic = fma(mul(mul(x, x), all(0.044715f)), x, x);
    return mul(x, sigmoid(mul(cubic, all(1.5957691216f))));
}

inline Floats activated(Activation activation, Floats x) {
    switch (activation) {
        case Activation::kNone: return x;
        case Activation::kSilu: return mul(x, sigmoid(x));
        case Activation::kGeluTanh: return gelu_tanh(x);
        case Activation::kRelu: return relu(x);
        case Activation::kRelu2: return mul(relu(x), relu(x));
    }
    return x;
}

inline Floats clamped_swiglu(Floats gate, Floats up, float alpha, float limit) {
    const Floats below = min(all(limit), gate);  // in this order, as above
    const Floats within = max(all(-limit), min(all(limit), up));
    return mul(add(within, all(1.0f)), mul(below, sigmoid(mul(all(alpha), below))));
}

// a + b in the lower of two lanes at this distance, a - b in the upper.
template <int Distance>
inline Floats butterfly(Floats x) {
    alignas(64) static constexpr auto signs = [] {
        struct {
            float of[kLanes];
        } table{};
        for (int i = 0; i < static_cast<int>(kLanes); i++)
            table.of[i] = i & Distance ? -1.0f : 1.0f;
        return table;
    }();
    return fma(x, load(signs.of), swapped<Distance>(x));
}

// Times Sylvester's matrix of +-1, in blocks of 8, 16 or 32 (`arithmetic.hadamard` of the
// exporter).
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

// Reduces 16 lanes to a number.
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

}  // namespace
}  // namespace streamspec::STREAMSPEC_ISA
