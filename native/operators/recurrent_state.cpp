// GatedDeltaRule and StateSpace, over rings of float32.
#include <algorithm>
#include <cstring>

#include "operators/custom_op.h"

namespace streamspec {
namespace {

constexpr size_t kMaxHeads = 1024, kRun = 8;
constexpr size_t kHeadsOfTask = 12;  // of a state space, at most
// Inputs after packed rows, tree mask and past length.
enum Ring : size_t { kKeys, kValues, kUpdates, kInputs, kDecays, kStates, kMarks, kRings };

// Rows of a call: which of them each sees, and how they stand to blocks.
struct Tree {
    StateRow rows[kStateBlock];
    uint8_t ancestors[kStateBlock][kStateBlock];
    size_t depths[kStateBlock];
    int parents[kStateBlock];
};

// Inputs: packed rows, tree mask, past length, the rings, bias and rate of decays, a state space's
// skip, weight of the norm, a state space's bias of the convolution, its taps: of the row, of that
// before it, ... Outputs: values of rows, the rings. A state space has no ring of updates; its norm
// and bias may be left out.
template <bool Solved>
struct RecurrentStateKernel {
    static constexpr const char* kName = Solved ? "GatedDeltaRule" : "StateSpace";
    static constexpr size_t kParts = Solved ? kRings : kRings - 1;
    RecurrentState node{};  // what the attributes say

    explicit RecurrentStateKernel(const ort::KernelInfo* info) {
        node.solved = Solved;
        node.key_heads = size_attribute(kName, info, "key_heads");
        node.heads = size_attribute(kName, info, "heads");
        node.key_width = size_attribute(kName, info, "key_width");
        node.width = size_attribute(kName, info, "width");
        node.eps = finite_attribute(kName, info, "eps", 1e-6f);
        if (node.key_heads == 0 || node.heads == 0 || node.heads > kMaxHeads ||
            node.heads % node.key_heads != 0)
            fail(kName,
                 std::to_string(node.heads) + " heads, " + std::to_string(node.key_heads) +
                     " key heads",
                 "up to 1024 heads, a multiple of key heads");
        for (const size_t width : {node.key_width, node.width})
            if (width == 0 || width % kLanes != 0 || width > kMaxHeadWidth)
                fail(kName, "a head width of " + std::to_string(width),
                     "a multiple of 16 up to " + std::to_string(kMaxHeadWidth));
        if (node.eps < 0.0f) fail(kName, "a negative eps", "a number from 0");
        if (Solved) {
            node.largest_step = finite_attribute(kName, info, "largest_step", 1.0f);
            if (!(node.largest_step > 0.0f && node.largest_step <= 2.0f))
                fail(kName, "steps up to " + std::to_string(node.largest_step),
                     "a number above 0 and up to 2");
            return;
        }
        node.least = finite_attribute(kName, info, "least", 0.0f);
        node.most = attribute(kName, info, "most", INFINITY);
        if (!(node.least <= node.most))
            fail(kName,
                 "steps of " + std::to_string(node.least) + " to " + std::to_string(node.most),
                 "a least one up to the most");
    }

    void compute(const Call& call) const {
        RecurrentState d = node;
        const Tensor packed = call.input(0), mask = call.input(1), past = call.input(2);
        d.rows = packed.dims.size() == 3 ? packed.dim(2) : 0;
        if (d.rows > kStateBlock)
            fail(kName, std::to_string(d.rows) + " rows", "up to " + std::to_string(kStateBlock));
        expect(kName, "packed rows", packed, ort::kFloat, {1, d.rows, packed_width(d)});
        d.packed = packed.floats();
        set_past_length(past, call.input(3), d);
        set_weights(call, d);
        float* rings[kRings];
        set_rings(call, d, rings);
        d.mixed = call.output<float>(0, {1, d.rows, d.heads * d.width});
        if (d.rows == 0) return;
        Tree tree;
        set_tree(mask, d, tree);
        set_sources(d, tree);
        d.of_rows = tree.rows;
        const size_t block = d.past_length / kStateBlock;
        float* mark = block ? rings[kMarks] + (block * kStateBlock - 1) % d.slots : nullptr;
        d.due = mark && !(*mark >= 1.0f);
        run_heads(call, d);
        // The last row of the newest whole block says that its state is there; rows that are
        // written lose such marks.
        if (mark) *mark = 1.0f;
        for (size_t row = 0; row < d.rows; row++)
            rings[kMarks][(d.past_length + row) % d.slots] = 0.0f;
    }

  private:
    // A task: heads of one key head. Few key heads of a state space are split among threads, which
    // compute the keys anew.
    static void run_heads(const Call& call, const RecurrentState& d) {
        const size_t group = d.heads / d.key_heads;
        const size_t parts = Solved ? 1 : (group + kHeadsOfTask - 1) / kHeadsOfTask;
        call.parallel(d.key_heads * parts, [&](size_t task) {
            const size_t first = task / parts * group, part = task % parts;
            const auto run = Solved ? kernels().delta_rule : kernels().state_space;
            run(d, first + group * part / parts, first + group * (part + 1) / parts,
                scratch<Scratch::kTask>(state_scratch(d)));
        });
        if (Solved || !d.norm) return;
        const size_t width = group * d.width;  // of what has one norm
        call.parallel_rows(d.rows, [&](size_t from, size_t to) {
            for (size_t i = from * d.key_heads; i < to * d.key_heads; i++)
                kernels().norm(d.mixed + i * width, nullptr, d.norm + i % d.key_heads * width,
                               d.eps, width, 0, 1, nullptr, d.mixed + i * width);
        });
    }

    static void set_past_length(const Tensor& past, const Tensor& keys, RecurrentState& d) {
        const int64_t length = past_length_of(kName, past);
        d.slots = keys.dims.size() == 4 ? keys.dims[2] : 0;
        d.past_length = static_cast<size_t>(length);
        const bool circular = d.slots >= 4 * kStateBlock && d.slots % kStateBlock == 0;
        if (length < 0 || length > INT64_MAX / 2 || (!circular && d.past_length + d.rows > d.slots))
            fail(kName,
                 std::to_string(d.rows) + " rows after " + std::to_string(length) +
                     " in a ring of " + std::to_string(d.slots) + " slots",
                 "a ring of 256 slots, of more that 64 divides, or one that holds all rows");
    }

    static void set_weights(const Call& call, RecurrentState& d) {
        size_t i = 3 + kParts;
        const auto weight = [&](const char* what, const Dims& dims) {
            const Tensor tensor = call.input(i++);
            expect(kName, what, tensor, ort::kFloat, dims);
            return tensor.floats();
        };
        d.decay_bias = weight("a bias of decays", {d.heads});
        d.decay_rate = weight("a rate of decays", {d.heads});
        if (!Solved) d.skip = weight("a skip", {d.heads, 1, 1});
        const auto optional = [&](const char* what, const Dims& dims) {
            if (call.input(i).exists()) return weight(what, dims);
            i++;
            return static_cast<const float*>(nullptr);
        };
        if (Solved) {
            d.norm = weight("a norm", {d.width});
        } else {
            d.norm = optional("a norm", {d.heads * d.width});
            d.taps_bias = optional("a bias of taps", {channels_of(d)});
        }
        while (d.tap_count < kMaxTaps && call.input(i).exists())
            d.taps[d.tap_count++] = weight("a tap", {channels_of(d)});
        if (d.tap_count == 0) fail(kName, "no taps", "one to 8");
    }

    // The rings as outputs: in place where the caller bound past and present to one memory.
    static void set_rings(const Call& call, RecurrentState& d, float** rings) {
        const size_t slices = d.heads * d.key_width * d.width / kStateBlock;
        const Dims dims[kRings] = {{1, d.key_heads, d.slots, d.key_width},
                                   {1, d.heads, d.slots, d.width},
                                   {1, d.heads, d.slots, d.width},
                                   {1, 1, d.slots, channels_of(d)},
                                   {1, 1, d.slots, 2 * d.heads},
                                   {1, 1, d.slots, slices},
                                   {1, 1, d.slots, 1}};
        const char* const names[kRings] = {"keys",   "values", "updates", "inputs",
                                           "decays", "states", "marks"};
        size_t part = 0;
        for (size_t i = 0; i < kRings; i++) {
            rings[i] = nullptr;
            if (!Solved && i == kUpdates) continue;
            const Tensor past = call.input(3 + part++);
            expect(kName, names[i], past, ort::kFloat, dims[i]);
            rings[i] = call.output<float>(part, dims[i]);
            if (rings[i] != past.data)
                std::memmove(rings[i], past.data, past.count() * sizeof(float));
        }
        d.keys = rings[kKeys];
        d.values = rings[kValues];
        d.updates = rings[kUpdates];
        d.inputs = rings[kInputs];
        d.decays = rings[kDecays];
        d.states = rings[kStates];
    }

    // Ancestors of rows, from a mask [rows, rows] of a tree: each row sees itself and what its
    // parent sees.
    static void set_tree(const Tensor& mask, const RecurrentState& d, Tree& tree) {
        expect(kName, "a tree mask", mask, ort::kFloat, {d.rows, d.rows});
        uint64_t seen[kStateBlock];
        const size_t committed = d.past_length % kStateBlock;
        for (size_t row = 0; row < d.rows; row++) {
            const float* biases = mask.floats() + row * d.rows;
            StateRow& out = tree.rows[row];
            out = StateRow{};
            out.base = tree.parents[row] = -1;
            seen[row] = 0;
            size_t depth = 0;
            for (size_t i = 0; i < d.rows; i++)
                if (biases[i] >= kMasked) {
                    seen[row] |= uint64_t{1} << i;
                    if (i >= row) continue;
                    depth++;
                    tree.parents[row] = static_cast<int>(i);
                }
            const int parent = tree.parents[row];
            if (seen[row] != ((parent < 0 ? 0 : seen[parent]) | uint64_t{1} << row))
                fail(kName, "a mask of row " + std::to_string(row),
                     "that of a tree: the row itself and what its parent sees");
            tree.depths[row] = depth;
            const size_t at = committed + depth;  // in the block or, from 64 on, in the next one
            const size_t run = at / kRun * kRun;
            uint8_t* ancestors = tree.ancestors[row];
            for (size_t i = 0; i < row; i++) {
                if (!(seen[row] >> i & 1)) continue;
                const size_t its = committed + tree.depths[i];
                if (its / kStateBlock == at / kStateBlock) {
                    ancestors[out.count++] = static_cast<uint8_t>(i);
                    out.in_run += its >= run;
                } else if (its == kStateBlock - 1) {
                    out.base = static_cast<int>(i);
                    tree.rows[i].continued = true;
                }
            }
            out.ancestors = ancestors;
            out.committed_in_run = committed > run ? committed - run : 0;
        }
    }

    // Where the inputs of the rows before each row lie: in the call, in the ring, or nowhere.
    static void set_sources(const RecurrentState& d, Tree& tree) {
        const size_t channels = channels_of(d), stride = packed_width(d);
        const float* inputs = d.packed + layout_of(d).inputs;
        for (size_t row = 0; row < d.rows; row++) {
            int at = static_cast<int>(row);
            for (size_t tap = 0; tap < d.tap_count; tap++) {
                const size_t back = tap - tree.depths[row];  // of committed rows
                if (at >= 0)
                    tree.rows[row].sources[tap] = inputs + static_cast<size_t>(at) * stride;
                else if (back <= d.past_length)
                    tree.rows[row].sources[tap] =
                        d.inputs + (d.past_length - back) % d.slots * channels;
                if (at >= 0) at = tree.parents[at];
            }
        }
    }
};

}  // namespace

std::vector<const ort::CustomOp*> recurrent_operators() {
    using ort::kFloat, ort::kInt64;
    const auto signature = [](size_t parts, size_t weights, size_t required) {
        Signature out{{kFloat, kFloat, kInt64}, std::vector<int>(1 + parts, kFloat), 3 + parts};
        out.inputs.resize(3 + parts + weights + kMaxTaps, kFloat);
        out.required_inputs += required;
        return out;
    };
    using Rule = RecurrentStateKernel<true>;
    using Space = RecurrentStateKernel<false>;
    static const Op<Rule> rule(signature(Rule::kParts, 3, 4));
    static const Op<Space> space(signature(Space::kParts, 5, 3));
    return {&rule, &space};
}

}  // namespace streamspec
