// Attention and DraftAttention, over caches of float32 or float16.
#include <algorithm>
#include <cstring>

#include "operators/custom_op.h"

namespace streamspec {
namespace {

constexpr size_t kMaxHeads = 1024;

// Inputs: packed, bias, [past_length,] keys, values, cos, sin, query norm, key norm[, rows of each
// sequence], sinks.
struct Inputs {
    Tensor packed, bias, past_length, keys, values, cos, sin, query_norm, key_norm, counts, sinks;

    Inputs(const Call& call, bool writes) {
        size_t i = 0;
        packed = call.input(i++);
        bias = call.input(i++);
        if (writes) past_length = call.input(i++);
        for (Tensor* input : {&keys, &values, &cos, &sin, &query_norm, &key_norm})
            *input = call.input(i++);
        if (writes) counts = call.input(i++);
        sinks = call.input(i);
    }
};

// `Writes`: keys and values of the rows go into the cache, which is also an output; else they are
// further columns where attribute `own` is 1. Several sequences have a cache each, [sequences, ..],
// as many past lengths, and rows one sequence after the other.
template <bool Writes, bool Half>
class AttentionKernel {
  public:
    static constexpr const char* kName = Writes ? (Half ? "AttentionFloat16" : "Attention")
                                         : Half ? "DraftAttentionFloat16"
                                                : "DraftAttention";

    explicit AttentionKernel(const ort::KernelInfo* info) {
        node_.heads = size_attribute(kName, info, "heads");
        node_.kv_heads = size_attribute(kName, info, "kv_heads");
        node_.width = size_attribute(kName, info, "width");
        node_.scale = finite_attribute(kName, info, "scale", 1.0f);
        node_.cap = finite_attribute(kName, info, "cap", 0.0f);
        node_.eps = finite_attribute(kName, info, "eps", 1e-6f);
        node_.ring = flag_attribute(kName, info, "ring");
        node_.interleaved = flag_attribute(kName, info, "interleaved");
        node_.norm_last = flag_attribute(kName, info, "norm_last");
        node_.half = Half;
        node_.write = Writes;
        has_keys_ = Writes || flag_attribute(kName, info, "own");
        const size_t heads = node_.heads, kv_heads = node_.kv_heads;
        if (heads == 0 || kv_heads == 0 || heads > kMaxHeads || heads % kv_heads != 0 ||
            heads / kv_heads > kMaxGroup)
            fail(kName,
                 std::to_string(heads) + " heads, " + std::to_string(kv_heads) + " key heads",
                 "up to 1024 heads, up to " + std::to_string(kMaxGroup) + " to a key head");
        if (node_.width == 0 || node_.width % kLanes != 0 || node_.width > kMaxHeadWidth)
            fail(kName, "a head width of " + std::to_string(node_.width),
                 "a multiple of 16 up to " + std::to_string(kMaxHeadWidth));
        if (node_.cap < 0.0f || node_.eps < 0.0f)
            fail(kName, "a negative cap or eps", "numbers from 0");
    }

    void compute(const Call& call) const {
        const Inputs inputs(call, Writes);
        Attention a = node_;
        set_packed(inputs, a);
        const size_t sequences = set_cache(inputs, a);
        set_bias(inputs, sequences, a);
        if (Writes && sequences == 1) set_past_length(inputs.past_length, a);
        set_rotation(inputs, a);
        set_norms_and_sinks(inputs, a);
        a.mixed = call.output<float>(0, {1, inputs.packed.dims[1], a.heads * a.width});
        if constexpr (Writes) {
            a.keys = written(call, 1, inputs.keys);
            a.values = written(call, 2, inputs.values);
        }
        if (a.rows == 0) return;
        if (a.row_columns)
            a.row_keys = scratch<Scratch::kRowKeys>(a.kv_heads * a.row_columns * a.width);
        if (sequences == 1) return run(call, &a, 1);
        const std::vector<Attention> split = split_sequences(a, inputs, sequences);
        run(call, split.data(), split.size());
    }

  private:
    void set_packed(const Inputs& inputs, Attention& a) const {
        const Tensor& packed = inputs.packed;
        const size_t queries_width = a.heads * a.width;
        const size_t keys_width = has_keys_ ? a.kv_heads * a.width : 0;
        a.rows = packed.dims.size() == 3 ? packed.dim(2) : 0;
        a.packed_stride = queries_width + 2 * keys_width;
        a.key_offset = queries_width;
        a.value_offset = queries_width + keys_width;
        expect(kName, "packed rows", packed, ort::kFloat, {1, a.rows, a.packed_stride});
        a.packed = packed.floats();
    }

    // Returns the number of sequences.
    size_t set_cache(const Inputs& inputs, Attention& a) const {
        const Dims& dims = inputs.keys.dims;
        const bool is_cache = dims.size() == 4;
        a.slots = is_cache ? dims[2] : 0;
        const size_t sequences = inputs.counts.exists() && is_cache ? dims[0] : 1;
        const Dims expected{sequences, a.kv_heads, a.slots, a.width};
        expect(kName, "keys", inputs.keys, kCacheType, expected);
        expect(kName, "values", inputs.values, kCacheType, expected);
        a.keys = const_cast<void*>(inputs.keys.data);
        a.values = const_cast<void*>(inputs.values.data);
        return sequences;
    }

    void set_bias(const Inputs& inputs, size_t sequences, Attention& a) const {
        const Tensor& bias = inputs.bias;
        a.row_columns = !Writes && has_keys_ ? a.rows : 0;
        const bool has_rows = bias.dims.size() >= 2;
        const size_t columns = has_rows ? bias.dim(1) : 0;
        const size_t min = a.rows ? std::max<size_t>(1, a.row_columns) : 0;
        const size_t max = a.slots + (sequences == 1 ? a.row_columns : a.rows);
        if (bias.type != ort::kFloat || !has_rows || bias.dim(2) != a.rows ||
            bias.count() != a.rows * columns || columns < min || columns > max)
            fail(kName, "a bias " + to_text(bias),
                 "float32 [.., " + std::to_string(a.rows) + ", " + std::to_string(min) + " to " +
                     std::to_string(max) + "]");
        a.used = columns - a.row_columns;
        a.bias = bias.floats();
    }

    void set_past_length(const Tensor& past_length, Attention& a) const {
        const int64_t length = past_length_of(kName, past_length);
        a.past_length = static_cast<size_t>(length);
        if (length < 0 || a.rows > a.slots || (!a.ring && a.past_length > a.slots - a.rows))
            fail(kName, std::to_string(a.rows) + " rows after " + std::to_string(length) + " slots",
                 "as many as a cache of " + std::to_string(a.slots) + " slots has left");
    }

    void set_rotation(const Inputs& inputs, Attention& a) const {
        const Tensor &cos = inputs.cos, &sin = inputs.sin;
        if (!cos.exists() && !sin.exists()) return;
        const size_t half = cos.dims.size() == 2 ? cos.dim(1) : 0;
        if (2 * half > a.width)
            fail(kName, "cos " + to_text(cos),
                 "up to " + std::to_string(a.width / 2) + " numbers a row");
        expect(kName, "cos", cos, ort::kFloat, {a.rows, half});
        expect(kName, "sin", sin, ort::kFloat, {a.rows, half});
        a.rotated = 2 * half;
        a.cos = cos.floats();
        a.sin = sin.floats();
    }

    void set_norms_and_sinks(const Inputs& inputs, Attention& a) const {
        const Tensor &query_norm = inputs.query_norm, &key_norm = inputs.key_norm;
        if (query_norm.exists())
            expect(kName, "a norm of queries", query_norm, ort::kFloat, {a.width});
        if (key_norm.exists()) expect(kName, "a norm of keys", key_norm, ort::kFloat, {a.width});
        a.query_norm = query_norm.floats();
        a.key_norm = key_norm.floats();
        if (inputs.sinks.exists()) expect(kName, "sinks", inputs.sinks, ort::kFloat, {a.heads});
        a.sinks = inputs.sinks.floats();
    }

    // The cache as an output: in place where the caller bound past and present to one memory.
    static void* written(const Call& call, size_t index, const Tensor& past) {
        char* out = call.output<char>(index, past.dims);
        if (out != past.data) std::memmove(out, past.data, past.count() * kNumberSize);
        return out;
    }

    // The sequences of a call that have rows. Of the bias [rows, longest past + rows] each sees as
    // many columns from the first as it has past slots, and those of its own rows.
    std::vector<Attention> split_sequences(const Attention& call, const Inputs& inputs,
                                           size_t sequences) const {
        const Tensor &past_length = inputs.past_length, &counts = inputs.counts;
        expect(kName, "past lengths", past_length, ort::kInt64, {sequences});
        expect(kName, "rows of each sequence", counts, ort::kInt64, {sequences});
        if (call.ring) fail(kName, "a ring of several sequences", "one");
        if (call.used < call.rows)
            fail(kName, "a bias of " + std::to_string(call.used) + " columns",
                 "a column of each of " + std::to_string(call.rows) + " rows");
        const size_t longest = call.used - call.rows, max = std::min(longest, call.slots);
        std::vector<Attention> out;
        size_t row = 0;
        for (size_t i = 0; i < sequences; i++) {
            const int64_t rows = counts.as<int64_t>()[i], past = past_length.as<int64_t>()[i];
            const size_t left = call.rows - row;
            if (rows < 0 || static_cast<size_t>(rows) > left || past < 0 ||
                static_cast<size_t>(past) > max || static_cast<size_t>(rows + past) > call.slots)
                fail(kName,
                     std::to_string(rows) + " rows of a sequence after " + std::to_string(past) +
                         " slots",
                     "up to " + std::to_string(left) + " after up to " + std::to_string(max));
            if (rows == 0) continue;
            out.push_back(
                sequence(call, i, row, static_cast<size_t>(rows), static_cast<size_t>(past)));
            row += static_cast<size_t>(rows);
        }
        if (row != call.rows)
            fail(kName, std::to_string(row) + " rows of all sequences", std::to_string(call.rows));
        split_bias(call, longest, out);
        return out;
    }

    // Sequence `index` of a call, whose rows start at `row`; its bias is the call's.
    static Attention sequence(const Attention& call, size_t index, size_t row, size_t rows,
                              size_t past) {
        Attention a = call;
        a.rows = rows;
        a.past_length = past;
        a.used = past + rows;
        a.packed += row * call.packed_stride;
        a.mixed += row * call.heads * call.width;
        if (a.cos) {
            a.cos += row * (call.rotated / 2);
            a.sin += row * (call.rotated / 2);
        }
        const size_t cache = call.kv_heads * call.slots * call.width * kNumberSize;
        a.keys = static_cast<char*>(call.keys) + index * cache;
        a.values = static_cast<char*>(call.values) + index * cache;
        return a;
    }

    // Copies the columns that each sequence sees of the call's bias.
    static void split_bias(const Attention& call, size_t longest, std::vector<Attention>& split) {
        size_t floats = 0;
        for (const Attention& a : split) floats += a.rows * a.used;
        float* to = scratch<Scratch::kBias>(floats);
        size_t row = 0;
        for (Attention& a : split) {
            a.bias = to;
            const float* from = call.bias + row * call.used;
            for (size_t i = 0; i < a.rows; i++, from += call.used, to += a.used) {
                std::memcpy(to, from, a.past_length * sizeof(float));
                std::memcpy(to + a.past_length, from + longest + row, a.rows * sizeof(float));
            }
            row += a.rows;
        }
    }

    void run(const Call& call, const Attention* sequences, size_t count) const {
        size_t tiles = 0, scores = 0, cache = 0;
        for (size_t i = 0; i < count; i++) {
            const Attention& a = sequences[i];
            if (has_keys_)
                call.parallel_rows(
                    a.rows, [&](size_t from, size_t to) { kernels().store_keys(a, from, to); });
            tiles += head_tiles(a) * row_tiles(a);
            scores += a.rows * (a.used + a.row_columns) * a.heads;
            cache += 2 * a.used * a.kv_heads * a.width * kNumberSize;
        }
        const auto attend = [&](size_t index) {
            const Attention* a = sequences;
            for (; index >= head_tiles(*a) * row_tiles(*a); a++)
                index -= head_tiles(*a) * row_tiles(*a);
            const size_t height = tile_height(*a), tiles_of_heads = row_tiles(*a);
            const size_t from = index % tiles_of_heads * height, heads = a->heads / head_tiles(*a);
            kernels().attend(*a, index / tiles_of_heads * heads, heads, from,
                             std::min(a->rows, from + height),
                             scratch<Scratch::kTask>(attention_scratch(*a, height)));
        };
        // What one thread computes alone: so many scores, of so many bytes of the cache.
        constexpr size_t kSmallScores = 4096, kSmallCache = 1 << 16;
        if (scores < kSmallScores && cache < kSmallCache)
            for (size_t i = 0; i < tiles; i++) attend(i);
        else
            call.parallel(tiles, attend);
    }

    // Rows of a tile: those that are attended for at once.
    static size_t tile_height(const Attention& a) {
        const size_t group = a.heads / a.kv_heads, max = std::max<size_t>(1, 24 / group);
        return std::min(max, a.rows * a.used * group > 2048 ? (a.rows + 1) / 2 : a.rows);
    }
    static size_t row_tiles(const Attention& a) {
        return (a.rows + tile_height(a) - 1) / tile_height(a);
    }

    // Groups of query heads, each with a tile of rows at a time: those that share a key head, or,
    // of a row over a single key head, which one thread would compute alone, a part of them.
    static size_t head_tiles(const Attention& a) {
        if (a.kv_heads > 1 || row_tiles(a) > 1) return a.kv_heads;
        return a.heads % 4 == 0 && a.heads >= 16 ? 4 : a.heads % 2 == 0 ? 2 : 1;
    }

    static constexpr int kCacheType = Half ? ort::kFloat16 : ort::kFloat;
    static constexpr size_t kNumberSize = Half ? 2 : 4;  // bytes of a number of the cache

    Attention node_{};       // what the attributes say
    bool has_keys_ = false;  // packed rows hold keys and values, not queries alone
};

template <bool Half>
const ort::CustomOp* writing_operator() {
    using ort::kFloat, ort::kInt64;
    constexpr int kCache = Half ? ort::kFloat16 : kFloat;
    static const Op<AttentionKernel<true, Half>> op(
        {{kFloat, kFloat, kInt64, kCache, kCache, kFloat, kFloat, kFloat, kFloat, kInt64, kFloat},
         {kFloat, kCache, kCache},
         5});
    return &op;
}

template <bool Half>
const ort::CustomOp* reading_operator() {
    using ort::kFloat;
    constexpr int kCache = Half ? ort::kFloat16 : kFloat;
    static const Op<AttentionKernel<false, Half>> op(
        {{kFloat, kFloat, kCache, kCache, kFloat, kFloat, kFloat, kFloat, kFloat}, {kFloat}, 4});
    return &op;
}

}  // namespace

std::vector<const ort::CustomOp*> attention_operators() {
    return {writing_operator<false>(), writing_operator<true>(), reading_operator<false>(),
            reading_operator<true>()};
}

}  // namespace streamspec
