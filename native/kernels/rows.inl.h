// Norms and the place of the largest, of rows of float32.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/lane_math.inl.h"

namespace streamspec::STREAMSPEC_ISA {
namespace {

void norm(const float* x, const float* update, const float* weight, float eps, size_t width,
          size_t from, size_t to, float* sum, float* y) {
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
        const Floats factor =
            all(1.0f / std::sqrt(across<add>(squares) / static_cast<float>(width) + eps));
        for (size_t i = 0; i < width; i += kLanes)
            store(out + i, mul(mul(load(out + i), factor), load(weight + i)));
    }
}

size_t argmax(const float* x, size_t width) {
    constexpr size_t kBlock = 64 * kLanes;  // searched once more where the largest is
    float best = -INFINITY;
    size_t first = 0, last = 0;
    for (size_t from = 0; from < width; from += kBlock) {
        const size_t to = std::min(from + kBlock, width);
        Floats maxima[4] = {all(best), all(best), all(best), all(best)};
        size_t i = from;
        for (; i + 4 * kLanes <= to; i += 4 * kLanes)
            each<4>([&](auto j) { maxima[j] = max(load(x + i + j * kLanes), maxima[j]); });
        float largest = across<max>(max(max(maxima[0], maxima[1]), max(maxima[2], maxima[3])));
        for (; i < to; i++) largest = x[i] > largest ? x[i] : largest;
        if (largest > best) {
            best = largest;
            first = from;
            last = to;
        }
    }
    return best == -INFINITY ? 0 : static_cast<size_t>(std::find(x + first, x + last, best) - x);
}

}  // namespace
}  // namespace streamspec::STREAMSPEC_ISA
