// ShortConv, over the inputs of rows before those of the call (export/layers/short_conv.py).
#include <algorithm>
#include <cstring>
#include <vector>

#include "operators/custom_op.h"

namespace streamspec {
namespace {

constexpr size_t kChannelsOfTask = 256;
constexpr size_t kSmallRows = 1u << 14;  // numbers of all rows that one thread mixes

// A call: rows as the input map gives them [rows, 3, width], of which the first times the last are
// inputs, and a ring of inputs [slots, width].
struct Rows {
    const float* packed;
    const float* taps[kMaxTaps];  // [width] each: of the row, of that before it, ..
    const int* parents;           // of each row: the row of the call before it, or -1
    const size_t* depths;         // how many rows of the call are before it
    float *ring, *mixed;
    size_t tap_count = 0, count, width, slots, past_length;
};

// Channels `from` to `to` of all rows; `inputs` has room for those of each row. The ring is written
// last: a row may take the slot of one that others still read.
void mix_channels(const Rows& d, size_t from, size_t to, float* inputs) {
    const size_t width = to - from;
    const auto part = [&](size_t row, size_t which) {
        return d.packed + (3 * row + which) * d.width + from;
    };
    for (size_t row = 0; row < d.count; row++) {
        const float *first = part(row, 0), *last = part(row, 2);
        for (size_t i = 0; i < width; i++) inputs[row * width + i] = first[i] * last[i];
    }
    for (size_t row = 0; row < d.count; row++) {
        float* const y = d.mixed + row * d.width + from;
        int at = static_cast<int>(row);
        for (size_t tap = 0; tap < d.tap_count; tap++) {
            const size_t back = tap - d.depths[row];  // of committed rows
            const float* x = nullptr;
            if (at >= 0)
                x = inputs + static_cast<size_t>(at) * width;
            else if (back <= d.past_length)
                x = d.ring + (d.past_length - back) % d.slots * d.width + from;
            else
                break;
            const float* const weights = d.taps[tap] + from;
            if (tap == 0)
                for (size_t i = 0; i < width; i++) y[i] = x[i] * weights[i];
            else
                for (size_t i = 0; i < width; i++) y[i] += x[i] * weights[i];
            if (at >= 0) at = d.parents[at];
        }
        const float* const gate = part(row, 1);
        for (size_t i = 0; i < width; i++) y[i] *= gate[i];
    }
    for (size_t row = 0; row < d.count; row++)
        std::memcpy(d.ring + (d.past_length + row) % d.slots * d.width + from, inputs + row * width,
                    width * sizeof(float));
}

// Inputs: packed rows, tree mask, past length, the ring, and taps: of the row, of that before it,
// ... Outputs: values of rows, and the ring.
struct ShortConvKernel {
    static constexpr const char* kName = "ShortConv";
    bool circular;

    explicit ShortConvKernel(const ort::KernelInfo* info)
        : circular(flag_attribute(kName, info, "ring")) {}

    void compute(const Call& call) const {
        const Tensor packed = call.input(0), mask = call.input(1), past = call.input(2);
        const Tensor ring = call.input(3);
        Rows d{};
        d.count = packed.dims.size() == 3 ? packed.dim(2) : 0;
        d.slots = ring.dims.size() == 4 ? ring.dim(2) : 0;
        d.width = ring.dims.size() == 4 ? ring.dim(1) : 0;
        expect(kName, "inputs", ring, ort::kFloat, {1, 1, d.slots, d.width});
        expect(kName, "packed rows", packed, ort::kFloat, {1, d.count, 3 * d.width});
        expect(kName, "a tree mask", mask, ort::kFloat, {d.count, d.count});
        for (; d.tap_count < kMaxTaps && call.input(4 + d.tap_count).exists(); d.tap_count++) {
            const Tensor tap = call.input(4 + d.tap_count);
            expect(kName, "a tap", tap, ort::kFloat, {d.width});
            d.taps[d.tap_count] = tap.floats();
        }
        if (d.tap_count == 0) fail(kName, "no taps", "one to 8");
        set_past_length(past, d);
        d.packed = packed.floats();
        d.mixed = call.output<float>(0, {1, d.count, d.width});
        d.ring = call.output<float>(1, ring.dims);
        // In place where the caller bound past and present to one memory.
        if (d.ring != ring.data) std::memmove(d.ring, ring.data, ring.count() * sizeof(float));
        if (d.count == 0 || d.width == 0) return;
        std::vector<int> parents(d.count);
        std::vector<size_t> depths(d.count);
        set_tree(mask.floats(), d.count, parents, depths);
        d.parents = parents.data();
        d.depths = depths.data();
        const size_t channels =
            d.count * d.width <= kSmallRows ? d.width : std::min(d.width, kChannelsOfTask);
        call.parallel((d.width + channels - 1) / channels, [&](size_t task) {
            const size_t from = task * channels, to = std::min(d.width, from + channels);
            mix_channels(d, from, to, scratch<Scratch::kTask>(d.count * (to - from)));
        });
    }

  private:
    void set_past_length(const Tensor& past, Rows& d) const {
        const int64_t length = past_length_of(kName, past);
        d.past_length = static_cast<size_t>(length);
        const size_t used = circular ? d.count : d.past_length + d.count;
        if (length < 0 || length > INT64_MAX / 2 || used > d.slots)
            fail(kName,
                 std::to_string(d.count) + " rows after " + std::to_string(length) + " in " +
                     std::to_string(d.slots) + " slots",
                 "slots for all of them");
    }

    // The newest row that each row sees before it, and how many rows are above.
    static void set_tree(const float* mask, size_t count, std::vector<int>& parents,
                         std::vector<size_t>& depths) {
        for (size_t row = 0; row < count; row++) {
            int parent = static_cast<int>(row) - 1;
            while (parent >= 0 && mask[row * count + static_cast<size_t>(parent)] < kMasked)
                parent--;
            parents[row] = parent;
            depths[row] = parent < 0 ? 0 : depths[static_cast<size_t>(parent)] + 1;
        }
    }
};

}  // namespace

std::vector<const ort::CustomOp*> convolution_operators() {
    using ort::kFloat, ort::kInt64;
    Signature signature{{kFloat, kFloat, kInt64, kFloat}, {kFloat, kFloat}, 5};
    signature.inputs.resize(4 + kMaxTaps, kFloat);
    static const Op<ShortConvKernel> conv(signature);
    return {&conv};
}

}  // namespace streamspec
