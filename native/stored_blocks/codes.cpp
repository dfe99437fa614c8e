// Reads the codes of a GGUF file's blocks: into the tiles of the operators, and times their scales
// into float32. What export/file_blocks/ says in numpy, in a tenth of the time; a test
// compares the two.
#include <algorithm>
#include <cstring>

#include "kernels/kernels.h"
#include "operators/ort_api.h"

namespace streamspec {
namespace {

constexpr size_t kMostWeights = 256;  // of a block
constexpr uint8_t kNothing6 = 32;     // the code of 6 bits in rows that fill up a tile

// Bits of all codes of a block. `at`: their first byte in it. Groups of `step` bytes hold the bits
// of `step` codes side by side, 8 / `width` times, from the lowest bit on; with a step of 0, which
// is of single bits, eight codes to a byte.
struct Bits {
    int64_t at, width, step;
};

// Blocks of `weights` codes in `bytes` bytes: low bits, and high ones above them, of width 0 where
// there are none.
struct Kind {
    int64_t weights, bytes;
    Bits low, high;
};

// Adds the bits to codes, above `low` bits that are there.
void add_bits(const Bits bits, int64_t low, int64_t weights, const uint8_t* block,
              uint8_t* __restrict codes) {
    const uint8_t* __restrict from = block + bits.at;
    if (bits.step == 0) {
        for (int64_t i = 0; i < weights; i++)
            codes[i] = static_cast<uint8_t>(codes[i] | (from[i / 8] >> i % 8 & 1) << low);
        return;
    }
    const int mask = (1 << bits.width) - 1;
    for (const uint8_t* end = codes + weights; codes < end; from += bits.step)
        for (int64_t shift = 0; shift < 8; shift += bits.width, codes += bits.step)
            for (int64_t i = 0; i < bits.step; i++)
                codes[i] = static_cast<uint8_t>(codes[i] | (from[i] >> shift & mask) << low);
}

void read_codes(const Kind& kind, const uint8_t* block, uint8_t* codes) {
    std::fill_n(codes, kind.weights, 0);
    add_bits(kind.low, 0, kind.weights, block, codes);
    if (kind.high.width) add_bits(kind.high, kind.low.width, kind.weights, block, codes);
}

// Codes of `count` inputs of a tile's rows, as `Linear` has them.
using TileCodes = uint8_t[kTile][kMostWeights];

void pack(const TileCodes& codes, size_t count, int64_t bits, uint8_t* out) {
    if (bits == 8) {
        for (size_t i = 0; i < count; i += 4)
            for (size_t row = 0; row < kTile; row++, out += 4) std::memcpy(out, &codes[row][i], 4);
    } else if (bits == 4) {
        for (size_t i = 0; i < count; i += 8)
            for (size_t row = 0; row < kTile; row++)
                for (size_t j = i; j < i + 8; j += 2)
                    *out++ = static_cast<uint8_t>(codes[row][j] | codes[row][j + 1] << 4);
    } else {
        constexpr size_t kPart = kLanes * 4;
        for (size_t i = 0; i < count; i += 16)
            for (size_t half = 0; half < kTile; half += kLanes, out += 3 * kPart)
                for (size_t lane = 0; lane < kLanes; lane++)
                    for (size_t j = 0; j < 4; j++) {
                        const uint8_t* four = &codes[half + lane][i + j];
                        const int a = four[0], b = four[4], c = four[8], d = four[12];
                        uint8_t* to = out + 4 * lane + j;
                        to[0] = static_cast<uint8_t>((a & 15) | (b & 15) << 4);
                        to[kPart] = static_cast<uint8_t>((c & 15) | (d & 15) << 4);
                        to[2 * kPart] =
                            static_cast<uint8_t>(a >> 4 | b >> 4 << 2 | c >> 4 << 4 | d >> 4 << 6);
                    }
    }
}

}  // namespace
}  // namespace streamspec

// Codes of rows of blocks [.., blocks * bytes] in tiles of `bits` bits (`Linear`). `order` [tiles,
// 32]: the row of each output, below zero for none.
STREAMSPEC_EXPORT void streamspec_tile_codes(const uint8_t* data, const int64_t* order,
                                             int64_t tiles, int64_t blocks,
                                             const streamspec::Kind* kind, int64_t bits,
                                             uint8_t* out) {
    using namespace streamspec;
    TileCodes codes;
    const auto weights = static_cast<size_t>(kind->weights);
    for (const int64_t* rows = order; rows < order + tiles * kTile; rows += kTile) {
        for (size_t row = 0; row < kTile; row++)
            if (rows[row] < 0) std::fill_n(codes[row], kMostWeights, bits == 6 ? kNothing6 : 0);
        for (int64_t block = 0; block < blocks; block++) {
            for (size_t row = 0; row < kTile; row++)
                if (rows[row] >= 0)
                    read_codes(*kind, data + (rows[row] * blocks + block) * kind->bytes,
                               codes[row]);
            pack(codes, weights, bits, out);
            out += kTile * weights * static_cast<size_t>(bits) / 8;
        }
    }
}

// Weights float32 of `blocks` blocks: scale * (code - offset) - minimum, or scale * table[code].
// `scales`, `minima`: float32, of `part` neighbouring weights each; minima and table may be null.
STREAMSPEC_EXPORT void streamspec_block_values(const uint8_t* data, int64_t blocks,
                                               const streamspec::Kind* kind, int64_t part,
                                               const float* scales, const float* minima,
                                               const float* table, float* out) {
    using namespace streamspec;
    uint8_t codes[kMostWeights];
    for (int64_t block = 0; block < blocks; block++, data += kind->bytes) {
        read_codes(*kind, data, codes);
        for (const uint8_t* code = codes; code < codes + kind->weights; scales++) {
            const float minimum = minima ? *minima++ : 0.0f;
            for (const uint8_t* end = code + part; code < end; code++)
                *out++ = minima ? *scales * table[*code] - minimum : *scales * table[*code];
        }
    }
}
