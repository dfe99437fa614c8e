// What the operators compute, as plain functions over memory: one table of them for each
// instruction set.
//
// Every number of a row is computed in an order that depends neither on how many rows there are,
// nor on where in the cache a row's keys lie, nor on how work is split among threads. Products of
// codes are whole numbers, exact in any order; all else goes lane by lane, with fused
// multiply-adds, in ascending order of blocks, slots and dimensions. Only the products of attention
// go through a head's dimensions in another order (`products` in attention.inl.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace streamspec {

constexpr size_t kLanes = 16;
constexpr size_t kTile = 2 * kLanes;  // outputs of a block of weights
constexpr size_t kRowAlign = 64;      // bytes
constexpr size_t kMaxGroup = 256;     // query heads of a key head
constexpr size_t kMaxHeadWidth = 1024;
constexpr float kMasked = -5000.0f;  // biases below this hide a slot
constexpr size_t kStateBlock = 64;   // a recurrent state is kept after as many tokens
constexpr size_t kMaxTaps = 8;       // rows that a short convolution mixes

enum class Activation : int64_t { kNone = 0, kSilu = 1, kGeluTanh = 2, kRelu = 3, kRelu2 = 4 };

// A linear map [out_features, in_features].
//
// 8 bits: codes int8 [tiles, in_features / 4, 32, 4]. 6 bits: bytes [tiles, in_features / 16, 2, 3,
// 16, 4] of 16 outputs in turn; of the four groups of four inputs, the first array holds the low
// four bits of groups 0 (low) and 1, the second those of 2 and 3, the third the two high bits of
// all; 32 means 0. 4 bits: bytes [tiles, in_features / 8, 32, 4], byte j of an output holds inputs
// 2 j (low) and 2 j + 1 of the eight. Gated: outputs are the gate's and the up map's, 16 of each in
// turn, and the result is activation(gate) * up; with a limit, (up + 1) * gate * sigmoid(alpha *
// gate), the gate no larger than that and up within -limit and limit.
struct Linear {
    int bits;
    size_t in_features, out_features, tiles;
    size_t block_size;  // inputs that share a scale, 4 bits and stored; else 0
    size_t mix;         // neighbouring inputs that a Hadamard matrix mixes first; 0 for none
    bool gated;
    Activation activation;
    float alpha, limit;  // of a clamped gate; a limit of 0: none
    const void* codes;
    const float* scales;           // 8 and 6 bits: float32 [32 * tiles], in the order of codes
    const uint16_t* block_scales;  // 4 bits: float16 [tiles, in_features / block_size, 32]
    const uint8_t* zero_points;    // 4 bits: [tiles, in_features / block_size, 32], null: 8
    const float* bias;             // float32 [32 * tiles] in the order of codes, or null
    // A file's own blocks of 32 or 16 inputs; codes as above, of 8 bits by two's complement. A
    // weight is scale * (code - offset), or scale * table[code], - minimum. Block scales and minima
    // are of 32 inputs each, or, where there are multipliers int8 [tiles, in_features / block_size,
    // 32], of 256 and times these.
    bool stored;
    int offset;           // of codes of 6 and 4 bits
    const int8_t* table;  // 16 values, four times; or null
    const uint16_t* minima;
    const int8_t *multipliers, *minimum_multipliers;
    size_t width() const { return gated ? out_features / 2 : out_features; }
};

// Quantized rows, one scale each. 8 and 6 bits: `sums8` is -(offset of weights) * sum of codes. 4
// bits: `sums4` is the sum of codes of each block; codes of eight inputs lie as 0 2 4 6 1 3 5 7.
// Stored blocks: a scale for each 32 inputs, and both sums of each block, those of all rows side by
// side: scales [in_features / 32, rows], sums [blocks, rows], codes [in_features / 32, rows, 32].
struct Rows {
    size_t rows, stride, blocks;
    int8_t* codes;
    float* scales;
    int32_t* sums8;
    float* sums4;
};

// Attention of `rows` rows over a cache [kv_heads, slots, width]. Packed: q, k and v of a row side
// by side.
struct Attention {
    size_t rows, heads, kv_heads, width;
    size_t slots;        // of the cache's memory
    size_t used;         // columns of the cache that are seen
    size_t row_columns;  // further columns: keys of the rows themselves, which are not in the cache
    size_t past_length;  // slots in use before these rows
    bool write, ring, half, interleaved, norm_last;
    float scale, cap, eps;
    const float* packed;
    size_t packed_stride, key_offset, value_offset;
    const float* bias;       // [rows, used + row_columns]
    const float *cos, *sin;  // [rows, rotated / 2], or null
    size_t rotated;
    const float *query_norm, *key_norm;  // [width], or null
    const float* sinks;                  // [heads], or null: a score of each head that has no value
    void *keys, *values;
    float* row_keys;  // [kv_heads, row_columns, width], scratch
    float* mixed;     // [rows, heads * width]
};

// A row of a layer with a recurrent state among the rows of its call, which are a tree. A block: 64
// tokens from a position that 64 divides.
struct StateRow {
    const float* sources[kMaxTaps];  // the row, that before it, ..: where its inputs lie, or null
    const uint8_t* ancestors;        // rows of its block that it sees besides itself, ascending
    size_t count, in_run;            // of these; and at their end, of its run of eight tokens
    size_t committed_in_run;         // committed rows of its run
    int base;  // row of the call that ends the block before its own; -1: its block began before
    bool continued;  // whether rows start from the state after this one
};

// A layer with a recurrent state, of `rows` rows over rings of `slots` slots
// (export/layers/recurrent_state.py has the equations): the gated delta rule, where what rows add
// is `solved`, or a state space.
struct RecurrentState {
    bool solved;
    size_t rows, past_length, slots;
    size_t key_heads, heads, key_width, width, tap_count;
    float eps;           // of the norm
    float largest_step;  // that the sigmoid of a step is multiplied by
    bool due;            // whether the state after the newest whole block is still to be computed
    const StateRow* of_rows;
    const float* packed;
    const float* taps[kMaxTaps];           // [channels] each: of the row, of that before it, ..
    const float* taps_bias;                // [channels], or null
    const float *decay_bias, *decay_rate;  // [heads]
    const float* norm;                     // solved: [width]; else [heads * width], or null
    const float* skip;                     // of a state space: [heads], what returns a row's values
    float least, most;                     // and limits of its steps
    float* keys;                           // [key_heads, slots, key_width]
    float *values, *updates;               // [heads, slots, width]: d and, where solved, w
    float *inputs, *decays;                // [slots, channels]; [slots, 2, heads]: g and b
    float* states;                         // [slots, heads * key_width * width / 64]
    float* mixed;                          // [rows, heads * width]
};

struct Kernels {
    const char* name;
    // Quantizes rows [from, to) of x [rows, in_features]; `scratch` holds one row of floats, padded
    // to 64.
    void (*quantize)(const Linear&, const float* x, size_t from, size_t to, const Rows&,
                     float* scratch);
    // Products of all rows with the tiles [from, to): y [rows, width()].
    void (*linear)(const Linear&, const Rows&, size_t from, size_t to, float* y);
    // Row `id` of a map of 8 or 6 bits, or of stored blocks, as a table [out_features,
    // in_features]: y [in_features], unmixed.
    void (*look_up)(const Linear&, size_t id, float* y);
    // Keys and values of rows [from, to): normalised, rotated, written to the cache or to
    // `row_keys`.
    void (*store_keys)(const Attention&, size_t from, size_t to);
    // Rows [from, to) of `heads` query heads from `head` on, which share a key head. `scratch`:
    // attention_scratch() floats.
    void (*attend)(const Attention&, size_t head, size_t heads, size_t from, size_t to,
                   float* scratch);
    // Root mean square norm of rows [from, to): y = (x + update) / rms * weight; `sum` gets x +
    // update. Any may be null but x, weight and y.
    void (*norm)(const float* x, const float* update, const float* weight, float eps, size_t width,
                 size_t from, size_t to, float* sum, float* y);
    // All rows of heads [from, to) of one key head, by the gated delta rule or, before the norm, by
    // a state space. `scratch`: state_scratch() floats.
    void (*delta_rule)(const RecurrentState&, size_t from, size_t to, float* scratch);
    void (*state_space)(const RecurrentState&, size_t from, size_t to, float* scratch);
    // The place of the first of the largest of x [width]; what is no number is none of them. 0
    // where none is above -infinity.
    size_t (*argmax)(const float* x, size_t width);
};

// Static: every file has its copy, of its instruction set.
static inline size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
static inline size_t attention_scratch(const Attention& a, size_t rows) {
    const size_t queries = rows * (a.heads / a.kv_heads);
    const size_t columns = round_up(a.used, kLanes) + round_up(a.row_columns, kLanes);
    return queries * (a.width + columns) + kLanes * a.width + 64;
}
static inline size_t channels_of(const RecurrentState& d) {
    return 2 * d.key_heads * d.key_width + d.heads * d.width;
}
static inline size_t packed_width(const RecurrentState& d) {
    return channels_of(d) + d.heads * (d.width + (d.solved ? 2 : 1));
}
// Where a packed row has what belongs to the first head: inputs of the convolution (queries, keys
// and values, of these inputs), gates of values, steps and, where solved, decays.
struct StateLayout {
    size_t inputs, queries, keys, values, gates, steps;
};
static inline StateLayout layout_of(const RecurrentState& d) {
    const size_t keys = d.key_heads * d.key_width, values = d.heads * d.width;
    const size_t channels = channels_of(d);
    if (d.solved) return {0, 0, keys, 2 * keys, channels, channels + values};
    return {values, values + keys, values, 0, 0, values + channels};
}
static inline size_t state_scratch(const RecurrentState& d) {
    const size_t columns = round_up(d.past_length % kStateBlock + d.rows, kLanes);
    const size_t sides = d.solved ? 2 : 1;  // that are looked for
    return 2 * columns + d.rows * (sides * (2 * columns + d.width) + 2 * d.key_width + d.width) +
           2 * round_up(d.rows, kLanes) + d.key_width * (kStateBlock + d.width);
}

// On x86: the processor's vendor, and at most how much work leaves weights in L1
// (`prefetch_weights`).
extern const bool kByAmd;
extern const int kWorkInL1;

// The tables that this processor runs, the best first.
struct Choices {
    const Kernels* of[8];
    size_t count;
};
Choices runnable_kernels();
// Their names: "avx2, portable".
const char* runnable_names();
// The table that STREAMSPEC_KERNELS names, the best where it is not set; null where it names none
// that this processor runs. The same for as long as the process lives.
const Kernels* chosen_kernels();
// The same, of operators: without it none are registered (`RegisterCustomOps`).
const Kernels& kernels();

}  // namespace streamspec
