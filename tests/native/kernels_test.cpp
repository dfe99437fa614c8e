// Compares the kernels of every instruction set that this processor runs, bit for bit: with the
// portable ones, and a row alone with the same row among others. Shapes are random; memory ends
// where the operators' does, for sanitizers to see. `kernels_test [cases] [seed]` prints one line,
// and returns 0 where all are equal; its hash of all results is that of other machines.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/kernels.h"

using namespace streamspec;

namespace {

struct Random {
    uint64_t state;
    uint64_t next() {
        state += 0x9e3779b97f4a7c15u;
        uint64_t z = state;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return z ^ z >> 31;
    }
    size_t below(size_t n) { return next() % n; }
    size_t between(size_t low, size_t high) { return low + below(high - low + 1); }
    bool chance(int percent) { return below(100) < static_cast<size_t>(percent); }
    float uniform() {
        return static_cast<float>(next() >> 40) * (2.0f / (1 << 24)) - 1.0f;
    }  // -1..1
    template <typename T>
    T one_of(std::initializer_list<T> values) {
        return values.begin()[below(values.size())];
    }
    std::vector<float> floats(size_t n, float most = 1.0f) {
        std::vector<float> out(n);
        for (float& x : out) x = uniform() * most;
        return out;
    }
    template <typename T>
    std::vector<T> bytes(size_t n, int low, int high) {
        std::vector<T> out(n);
        for (T& x : out)
            x = static_cast<T>(low + static_cast<int>(below(static_cast<size_t>(high - low + 1))));
        return out;
    }
};

std::string where;  // the case that is being computed
bool equal = true;

uint64_t hash = 14695981039346656037u;  // FNV-1a of what the portable kernels gave

void note(uint64_t number) { hash = (hash ^ number) * 1099511628211u; }
void note(const std::vector<float>& numbers) {
    for (float x : numbers) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        note(std::isnan(x) ? 0x7fc00000u : bits);
    }
}
template <typename T>
void note(const std::vector<T>& bytes) {
    for (T x : bytes) note(static_cast<uint64_t>(static_cast<uint8_t>(x)));
}

void expect(bool holds, const char* kernels, const char* what) {
    if (!holds && equal)
        std::printf("kernels_test: %s: %s differs (%s)\n", kernels, what, where.c_str());
    equal = equal && holds;
}

template <typename T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() &&
           (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}
// Bits of numbers; what is no number has many.
bool same_numbers(const std::vector<float>& a, const std::vector<float>& b) {
    for (size_t i = 0; i < a.size(); i++)
        if (!(std::isnan(a[i]) && std::isnan(b[i])) && std::memcmp(&a[i], &b[i], 4) != 0)
            return false;
    return a.size() == b.size();
}

// ---- linear maps

struct Products {
    std::vector<int8_t> codes;
    std::vector<float> scales, y;
};

Products multiply(const Kernels& kernels, const Linear& map, const std::vector<float>& x,
                  Random random) {
    const size_t rows = x.size() / map.in_features, stride = round_up(map.in_features, kRowAlign);
    const size_t blocks = map.block_size ? map.in_features / map.block_size : 1;
    Products out{std::vector<int8_t>(rows * stride),
                 std::vector<float>(map.stored ? rows * (map.in_features / 32) : rows),
                 std::vector<float>(rows * map.width(), 7.0f)};
    std::vector<int32_t> sums8(rows * blocks);
    std::vector<float> sums4(rows * blocks), scratch(stride);
    const Rows quantized{rows,         stride,      blocks, out.codes.data(), out.scales.data(),
                         sums8.data(), sums4.data()};
    const size_t half = random.below(rows + 1),
                 tile = random.below(map.tiles + 1);  // as if by two threads
    kernels.quantize(map, x.data(), 0, half, quantized, scratch.data());
    kernels.quantize(map, x.data(), half, rows, quantized, scratch.data());
    kernels.linear(map, quantized, tile, map.tiles, out.y.data());
    kernels.linear(map, quantized, 0, tile, out.y.data());
    return out;
}

void linear(const Choices& choices, Random random) {
    Linear map{};
    std::vector<int8_t> table = random.bytes<int8_t>(16, -127, 127);
    for (size_t i = 0; i < 48; i++) table.push_back(table[i]);
    map.bits = random.one_of({8, 6, 4});
    map.block_size = map.bits == 4 ? random.one_of<size_t>({32, 64, 128}) : 0;
    map.mix = random.one_of<size_t>({0, 0, 8, 16, 32});
    map.in_features = map.bits == 4 ? map.block_size * random.between(1, 4)
                      : map.mix     ? map.mix * random.between(1, 20)
                                    : random.between(1, 300);
    map.stored = random.chance(40);
    const bool multiplied = random.chance(60);
    if (map.stored) {
        map.mix = 0;
        map.table = map.bits == 4 && random.chance(40) ? table.data() : nullptr;
        map.offset = map.table || map.bits == 8 ? 0 : random.one_of({0, 4, 8, 16, 32});
        map.block_size =
            multiplied && !map.table && map.bits != 8 ? random.one_of<size_t>({16, 32}) : 32;
        map.in_features = multiplied ? 256 * random.between(1, 2) : 32 * random.between(1, 9);
    }
    map.gated = random.chance(30);
    map.out_features = map.gated ? 32 * random.between(1, 4) : random.between(1, 140);
    map.tiles = round_up(map.out_features, kTile) / kTile;
    map.activation = static_cast<Activation>(random.below(5));
    const size_t rows = random.between(1, 40), padded = map.tiles * kTile;
    where = std::to_string(map.bits) + " bits, blocks of " + std::to_string(map.block_size) +
            ", mix " + std::to_string(map.mix) + ", " + std::to_string(map.in_features) +
            " inputs, " + std::to_string(map.out_features) + " outputs, " + std::to_string(rows) +
            " rows, activation " + std::to_string(static_cast<int>(map.activation)) +
            (map.gated ? ", gated" : "") + (map.stored ? ", stored" : "") +
            (map.stored && multiplied ? ", multiplied" : "") + (map.table ? ", table" : "");
    const auto codes8 = random.bytes<int8_t>(padded * round_up(map.in_features, 4),
                                             random.chance(20) ? 127 : -128, 127);
    const bool largest = random.chance(10);  // what sums of few bits must hold
    const auto codes6 = random.bytes<uint8_t>(padded * round_up(map.in_features, 16) / 4 * 3,
                                              largest ? 255 : 0, 255);
    const auto codes4 = random.bytes<uint8_t>(padded * map.in_features / 2, largest ? 255 : 0, 255);
    const auto scales = random.floats(padded, 0.01f), bias = random.floats(padded);
    const size_t blocks = map.block_size ? map.in_features / map.block_size : 0;
    std::vector<uint16_t> halves(padded * blocks);
    for (uint16_t& half : halves)
        half = static_cast<uint16_t>(random.chance(5) ? random.below(0x400)
                                                      : random.between(0x400, 0x3400));
    const auto zeros = random.bytes<uint8_t>(padded * blocks, 0, 15);
    map.codes = map.bits == 8   ? static_cast<const void*>(codes8.data())
                : map.bits == 6 ? codes6.data()
                                : codes4.data();
    map.scales = scales.data();
    map.block_scales = halves.data();
    map.zero_points = random.chance(50) ? zeros.data() : nullptr;
    const auto multipliers = random.bytes<int8_t>(padded * blocks, -128, 127);
    if (map.stored) {
        map.minima = random.chance(50) ? halves.data() : nullptr;
        if (multiplied) map.multipliers = map.minimum_multipliers = multipliers.data();
    }
    map.bias = random.chance(50) ? bias.data() : nullptr;
    std::vector<float> x =
        random.floats(rows * map.in_features, random.one_of({1.0f, 1e-4f, 300.0f}));
    if (largest) std::fill(x.begin(), x.end(), random.one_of({1.0f, -1.0f}));
    if (random.chance(20))
        std::fill(x.begin(), x.begin() + static_cast<long>(map.in_features), 0.0f);
    if (random.chance(10))
        std::fill(x.begin(), x.begin() + static_cast<long>(map.in_features), 1e-41f);
    if (random.chance(10))
        x[random.below(x.size())] = random.one_of({NAN, INFINITY, -INFINITY, 3e38f});
    const Products truth = multiply(*choices.of[choices.count - 1], map, x, random);
    note(truth.codes);
    note(truth.y);
    for (size_t i = 0; i < choices.count; i++) {
        const Kernels& kernels = *choices.of[i];
        const Products found = multiply(kernels, map, x, random);
        expect(same(found.codes, truth.codes), kernels.name, "codes of rows");
        expect(same_numbers(found.scales, truth.scales), kernels.name, "scales of rows");
        expect(same_numbers(found.y, truth.y), kernels.name, "a product");
        const size_t row = random.below(rows);
        const std::vector<float> alone(x.begin() + static_cast<long>(row * map.in_features),
                                       x.begin() + static_cast<long>((row + 1) * map.in_features));
        const std::vector<float> among(
            truth.y.begin() + static_cast<long>(row * map.width()),
            truth.y.begin() + static_cast<long>((row + 1) * map.width()));
        expect(same_numbers(multiply(kernels, map, alone, random).y, among), kernels.name,
               "the product of a row alone");
        if ((map.bits != 4 || map.stored) && !map.gated) {
            std::vector<float> row_of_table(round_up(map.in_features, kRowAlign)),
                other = row_of_table;
            const size_t id = random.below(map.out_features);
            kernels.look_up(map, id, row_of_table.data());
            choices.of[choices.count - 1]->look_up(map, id, other.data());
            expect(same(row_of_table, other), kernels.name, "a row of a table");
        }
    }
}

// ---- norms

void norm(const Choices& choices, Random random) {
    const size_t width = kLanes * random.between(1, 40), rows = random.between(1, 5);
    where = "norm of " + std::to_string(width);
    const auto x = random.floats(rows * width, 3.0f), update = random.floats(rows * width),
               weight = random.floats(width);
    const bool updated = random.chance(50);
    std::vector<float> truth;
    for (size_t i = choices.count; i-- > 0;) {
        std::vector<float> both(2 * rows * width);
        choices.of[i]->norm(x.data(), updated ? update.data() : nullptr, weight.data(), 1e-6f,
                            width, 0, rows, updated ? both.data() : nullptr,
                            both.data() + rows * width);
        if (truth.empty()) note(truth = both);
        expect(same(both, truth), choices.of[i]->name, "a norm");
    }
}

void argmax(const Choices& choices, Random random) {
    const size_t width = random.between(1, 3000);
    where = "argmax of " + std::to_string(width);
    auto x = random.floats(width);
    for (int i = 0; i < 40; i++)
        x[random.below(width)] = random.one_of({NAN, INFINITY, -INFINITY, 0.999f});
    if (random.chance(20)) std::fill(x.begin(), x.end(), random.one_of({NAN, -INFINITY}));
    size_t truth = 0;
    for (size_t i = 1; i < width; i++)
        if (x[i] > (std::isnan(x[truth]) ? -INFINITY : x[truth])) truth = i;
    if (std::isnan(x[truth])) truth = 0;
    for (size_t i = 0; i < choices.count; i++)
        expect(choices.of[i]->argmax(x.data(), width) == truth, choices.of[i]->name,
               "the place of the largest");
}

// ---- attention

struct Cache {
    std::vector<char> keys, values;
    std::vector<float> mixed;
};

// Rows of the whole, in tiles of `height` rows and `heads` query heads.
Cache attend(const Kernels& kernels, Attention a, Cache cache, size_t height, size_t heads) {
    std::vector<float> own(a.kv_heads * a.row_columns * a.width),
        scratch(attention_scratch(a, height));
    a.row_keys = own.data();
    a.keys = cache.keys.data();
    a.values = cache.values.data();
    a.mixed = cache.mixed.data();
    if (a.write || a.row_columns) kernels.store_keys(a, 0, a.rows);
    for (size_t head = 0; head < a.heads; head += heads)
        for (size_t from = 0; from < a.rows; from += height)
            kernels.attend(a, head, heads, from, std::min(a.rows, from + height), scratch.data());
    return cache;
}

void attention(const Choices& choices, Random random) {
    Attention a{};
    a.kv_heads = random.between(1, 3);
    const size_t group = random.between(1, 7);
    a.heads = a.kv_heads * group;
    a.width = kLanes * random.between(1, 9);
    a.write = random.chance(60);
    const bool own = a.write || random.chance(60);
    a.half = random.chance(40);
    a.ring = a.write && random.chance(40);
    a.interleaved = random.chance(40);
    a.norm_last = random.chance(40);
    a.scale = 0.2f;
    a.cap = random.chance(30) ? 5.0f : 0.0f;
    a.eps = 1e-6f;
    a.rows = random.between(1, 20);
    a.slots = a.rows + random.below(60);
    a.row_columns = own && !a.write ? a.rows : 0;
    a.past_length = random.below(a.ring ? 1000 : a.slots - a.rows + 1);
    a.used = a.ring    ? std::min(a.slots, a.past_length + a.rows)
             : a.write ? a.past_length + a.rows
                       : random.below(a.slots + 1);
    if (a.used + a.row_columns == 0) return;
    where = std::to_string(a.heads) + "/" + std::to_string(a.kv_heads) + " heads of " +
            std::to_string(a.width) + ", " + std::to_string(a.rows) + " rows, " +
            std::to_string(a.used) + " of " + std::to_string(a.slots) + " slots, own " +
            std::to_string(a.row_columns) + (a.half ? ", float16" : "") + (a.ring ? ", ring" : "") +
            (a.cap > 0 ? ", cap" : "");
    const size_t queries_width = a.heads * a.width, keys_width = own ? a.kv_heads * a.width : 0;
    a.packed_stride = queries_width + 2 * keys_width;
    a.key_offset = queries_width;
    a.value_offset = queries_width + keys_width;
    const auto packed = random.floats(a.rows * a.packed_stride, 4.0f);
    a.packed = packed.data();
    a.rotated = random.chance(70) ? 2 * random.between(1, a.width / 2) : 0;
    const auto cos = random.floats(a.rows * a.rotated / 2),
               sin = random.floats(a.rows * a.rotated / 2), weight = random.floats(a.width, 2.0f);
    if (a.rotated) a.cos = cos.data(), a.sin = sin.data();
    if (random.chance(50)) a.query_norm = weight.data();
    if (random.chance(50)) a.key_norm = weight.data();
    const size_t columns = a.used + a.row_columns;
    std::vector<float> bias(a.rows * columns);
    for (size_t row = 0; row < a.rows; row++) {
        for (size_t i = 0; i < columns; i++)
            bias[row * columns + i] = random.chance(50) ? 0.0f : -10000.0f;
        bias[row * columns + random.below(columns)] = 0.0f;
    }
    a.bias = bias.data();
    Cache cache;
    const size_t count = a.kv_heads * a.slots * a.width;
    for (std::vector<char>* side : {&cache.keys, &cache.values}) {
        side->resize(count * (a.half ? 2 : 4));
        const auto numbers = random.floats(count, 2.0f);
        for (size_t i = 0; i < count; i++) {
            const size_t magnitude = random.below(0x4200);
            const auto half = static_cast<uint16_t>(magnitude | random.below(2) << 15);
            if (a.half)
                std::memcpy(side->data() + 2 * i, &half, 2);
            else
                std::memcpy(side->data() + 4 * i, &numbers[i], 4);
        }
    }
    cache.mixed.assign(a.rows * queries_width, 7.0f);
    const Cache truth = attend(*choices.of[choices.count - 1], a, cache, a.rows, group);
    note(truth.keys);
    note(truth.values);
    note(truth.mixed);
    for (size_t i = 0; i < choices.count; i++) {
        const size_t heads = random.below(2) ? group : group % 2 ? 1 : group / 2;
        const Cache found = attend(*choices.of[i], a, cache, random.between(1, a.rows), heads);
        expect(same(found.keys, truth.keys) && same(found.values, truth.values),
               choices.of[i]->name, "a cache");
        expect(same_numbers(found.mixed, truth.mixed), choices.of[i]->name,
               "a result of attention");
    }
}

// ---- recurrent states

struct Rings {
    std::vector<float> keys, values, updates, inputs, decays, states, mixed;
};

// Heads of a key head from `part` on apart, as if by another thread.
Rings remember(const Kernels& kernels, RecurrentState d, Rings rings, size_t part) {
    d.keys = rings.keys.data();
    d.values = rings.values.data();
    d.updates = rings.updates.data();
    d.inputs = rings.inputs.data();
    d.decays = rings.decays.data();
    d.states = rings.states.data();
    d.mixed = rings.mixed.data();
    std::vector<float> scratch(state_scratch(d));
    const size_t group = d.heads / d.key_heads;
    const auto run = d.solved ? kernels.delta_rule : kernels.state_space;
    for (size_t head = 0; head < d.heads; head += group) {
        run(d, head, head + part, scratch.data());
        if (part < group) run(d, head + part, head + group, scratch.data());
    }
    return rings;
}

// Rows of a text.
void recurrent_state(const Choices& choices, Random random) {
    RecurrentState d{};
    d.solved = random.chance(50);
    d.key_heads = random.between(1, 2);
    const size_t group = random.between(1, 3);
    d.heads = d.key_heads * group;
    d.key_width = kLanes * random.between(1, 5);
    d.width = kLanes * random.between(1, 5);
    d.tap_count = random.between(1, 4);
    d.rows = random.between(1, random.chance(20) ? kStateBlock : 8);
    d.slots = 4 * kStateBlock;
    d.past_length = random.below(500);
    d.due = d.past_length >= kStateBlock && random.chance(50);
    d.eps = 1e-6f;
    d.largest_step = 1.5f;
    d.least = 0.01f;
    d.most = 2.0f;
    where = std::string(d.solved ? "delta rule, " : "state space, ") + std::to_string(d.heads) +
            "/" + std::to_string(d.key_heads) + " heads of " + std::to_string(d.key_width) + " x " +
            std::to_string(d.width) + ", " + std::to_string(d.rows) + " rows after " +
            std::to_string(d.past_length);
    const size_t channels = channels_of(d), size = d.heads * d.key_width * d.width;
    const auto packed = random.floats(d.rows * packed_width(d), 2.0f),
               taps = random.floats(d.tap_count * channels), taps_bias = random.floats(channels),
               bias = random.floats(d.heads), norm = random.floats(d.width);
    auto rate = random.floats(d.heads);
    for (float& x : rate) x = -std::fabs(x);
    d.packed = packed.data();
    d.decay_bias = bias.data();
    d.decay_rate = rate.data();
    d.norm = norm.data();
    d.skip = bias.data();
    d.taps_bias = d.solved ? nullptr : taps_bias.data();
    for (size_t tap = 0; tap < d.tap_count; tap++) d.taps[tap] = taps.data() + tap * channels;
    const size_t committed = d.past_length % kStateBlock;
    std::vector<StateRow> rows(d.rows);
    std::vector<uint8_t> numbers(d.rows);
    for (size_t row = 0; row < d.rows; row++) {
        numbers[row] = static_cast<uint8_t>(row);
        StateRow& out = rows[row];
        const size_t at = committed + row, begin = at / kStateBlock * kStateBlock;
        const size_t first = begin > committed ? begin - committed : 0;
        out.base = begin ? static_cast<int>(first) - 1 : -1;
        out.ancestors = numbers.data() + first;
        out.count = row - first;
        out.in_run = std::min(out.count, at % 8);
        out.committed_in_run = begin ? 0 : std::min(committed, at % 8 - out.in_run);
        out.continued = at % kStateBlock == kStateBlock - 1 && row + 1 < d.rows;
        for (size_t tap = 0; tap < std::min(d.tap_count, row + 1); tap++)
            out.sources[tap] = packed.data() + (row - tap) * packed_width(d) + layout_of(d).inputs;
    }
    d.of_rows = rows.data();
    Rings rings;
    rings.keys = random.floats(d.key_heads * d.slots * d.key_width, 0.2f);
    rings.values = random.floats(d.heads * d.slots * d.width);
    rings.updates = rings.values;
    rings.inputs = random.floats(d.slots * channels);
    rings.decays = random.floats(d.slots * 2 * d.heads);
    for (float& x : rings.decays) x = -std::fabs(x);
    rings.states = random.floats(d.slots * size / kStateBlock);
    rings.mixed.assign(d.rows * d.heads * d.width, 7.0f);
    const Rings truth = remember(*choices.of[choices.count - 1], d, rings, group);
    note(truth.values);
    note(truth.mixed);
    for (size_t i = 0; i < choices.count; i++) {
        const Rings found = remember(*choices.of[i], d, rings, random.between(1, group));
        expect(same(found.keys, truth.keys) && same(found.values, truth.values) &&
                   same(found.updates, truth.updates) && same(found.inputs, truth.inputs) &&
                   same(found.decays, truth.decays) && same(found.states, truth.states),
               choices.of[i]->name, "a ring of a state");
        expect(same(found.mixed, truth.mixed), choices.of[i]->name, "a result of a state");
    }
}

}  // namespace

int main(int count, char** arguments) {
    const Choices choices = runnable_kernels();
    const int cases = count > 1 ? std::atoi(arguments[1]) : 600;
    Random random{count > 2 ? static_cast<uint64_t>(std::atoll(arguments[2])) : 1};
    for (int i = 0; i < cases && equal; i++) {
        linear(choices, Random{random.next()});
        norm(choices, Random{random.next()});
        argmax(choices, Random{random.next()});
        attention(choices, Random{random.next()});
        recurrent_state(choices, Random{random.next()});
    }
    if (!equal) return 1;
    std::string names;
    for (size_t i = 0; i < choices.count; i++)
        names += (i ? ", " : "") + std::string(choices.of[i]->name);
    std::printf("kernels_test: %s: equal in %d cases, hash %016llx\n", names.c_str(), cases,
                static_cast<unsigned long long>(hash));
    return 0;
}
