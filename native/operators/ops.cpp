// ONNX Runtime's custom operators of the domain `streamspec` (docs/reference/native-operators.md). Shapes are checked
// before a kernel sees them; what does not fit is an error of the call: what was found and expected, in one line.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/kernels.h"
#include "operators/ort_api.h"

namespace streamspec {
namespace {

ort::Api api;

// ---- errors and tensors

struct Failure {
    std::string text;
};

[[noreturn]] void fail(const char* op, const std::string& found, const std::string& expected) {
    throw Failure{std::string(op) + ": " + found + ", expected " + expected};
}

void check(ort::Status* status) {
    if (status == nullptr) return;
    api.release_status(status);
    throw Failure{"ONNX Runtime refused a call of its interface"};
}

constexpr size_t kMostDims = 8;

// A shape, in memory of its own: operators take microseconds, and some have nine inputs.
class Dims {
  public:
    Dims() = default;
    Dims(std::initializer_list<size_t> given) {
        for (size_t dim : given) push_back(dim);
    }
    Dims(const int64_t* given, size_t count) : size_(count) { std::copy(given, given + count, of_); }
    size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }
    const int64_t* data() const { return of_; }
    size_t operator[](size_t place) const { return static_cast<size_t>(of_[place]); }
    void back(size_t dim) { of_[size_ - 1] = static_cast<int64_t>(dim); }
    void push_back(size_t dim) { of_[size_++] = static_cast<int64_t>(dim); }
    void pop_back() { size_--; }
    bool operator==(const Dims& other) const { return std::equal(of_, of_ + size_, other.of_, other.of_ + other.size_); }
    bool operator!=(const Dims& other) const { return !(*this == other); }

  private:
    int64_t of_[kMostDims];
    size_t size_ = 0;
};

struct Tensor {
    const void* data = nullptr;
    int type = 0;
    Dims dims;
    bool there() const { return data != nullptr; }
    template <typename T>
    const T* as() const { return static_cast<const T*>(data); }
    size_t dim(size_t from_end) const { return dims[dims.size() - from_end]; }
    size_t count() const {
        size_t out = 1;
        for (size_t i = 0; i < dims.size(); i++) out *= dims[i];
        return out;
    }
};

std::string listed(const Dims& dims) {
    std::string out;
    for (size_t i = 0; i < dims.size(); i++) out += (i ? ", " : "") + std::to_string(dims[i]);
    return "[" + out + "]";
}

std::string named(int type) {
    switch (type) {
        case 0: return "nothing";
        case ort::kFloat: return "float32";
        case ort::kUint8: return "uint8";
        case ort::kInt8: return "int8";
        case ort::kInt64: return "int64";
        case ort::kFloat16: return "float16";
        default: return "type " + std::to_string(type);
    }
}

std::string shown(const Tensor& tensor) { return tensor.there() ? named(tensor.type) + " " + listed(tensor.dims) : "nothing"; }

bool fits(const Tensor& tensor, int type, const Dims& dims) { return tensor.type == type && tensor.dims == dims; }

void expect(const char* op, const char* what, const Tensor& tensor, int type, const Dims& dims) {
    if (!fits(tensor, type, dims)) fail(op, std::string(what) + " " + shown(tensor), named(type) + " " + listed(dims));
}

Tensor describe(const ort::Value* value) {
    Tensor out;
    if (value == nullptr) return out;
    const int64_t* dims = nullptr;
    size_t rank = 0;
    check(api.tensor_type(value, &out.type, &dims, &rank));
    if (rank > kMostDims) throw Failure{"a tensor of more than 8 dimensions"};
    out.dims = Dims(dims, rank);
    void* data = nullptr;
    check(api.tensor_data(value, &data));
    static const char nothing = 0;  // a tensor without elements may have no memory
    out.data = data ? data : &nothing;
    return out;
}

struct Call {
    ort::KernelContext* context;
    size_t inputs = 0, outputs = 0;
    explicit Call(ort::KernelContext* c) : context(c) {
        check(api.input_count(context, &inputs));
        check(api.output_count(context, &outputs));
    }
    Tensor input(size_t index) const { return describe(value(index)); }
    const ort::Value* value(size_t index) const {  // null where it was left out
        const ort::Value* out = nullptr;
        if (index < inputs) check(api.input(context, index, &out));
        return out;
    }
    template <typename T>
    T* output(size_t index, const Dims& dims) const {
        ort::Value* value = nullptr;
        check(api.output(context, index, dims.data(), dims.size(), &value));
        void* data = nullptr;
        if (value) check(api.tensor_data(value, &data));
        return static_cast<T*>(data);
    }
    // Runs body(0) .. body(total - 1) on the session's threads. They are not ours: an exception, for want of memory, is
    // kept and thrown here.
    template <typename Body>
    void parallel(size_t total, const Body& body) const {
        if (total <= 1) {
            if (total) body(0);
            return;
        }
        struct Work {
            const Body& body;
            std::atomic<bool> failed;
        } work{body, {false}};
        const auto run = [](void* data, size_t index) {
            Work& mine = *static_cast<Work*>(data);
            try {
                mine.body(index);
            } catch (...) {
                mine.failed = true;
            }
        };
        check(api.parallel_for(context, run, total, &work));
        if (work.failed) throw Failure{"out of memory"};
    }
};

// Memory of one thread, kept between calls: as much as the largest took. Holds what is written to it, of any type.
// STREAMSPEC_EXACT_SCRATCH: as much as this call takes, for a sanitizer to see where it ends.
template <int Use>
float* scratch(size_t floats) {
    constexpr std::align_val_t kAlign{kRowAlign};
    struct Memory {
        void* all = nullptr;
        size_t floats = 0;
        ~Memory() { ::operator delete(all, kAlign); }
    };
    thread_local Memory memory;
#ifdef STREAMSPEC_EXACT_SCRATCH
    const bool enough = memory.floats == floats;
#else
    const bool enough = memory.floats >= floats;
#endif
    if (!enough) {
        ::operator delete(memory.all, kAlign);
        memory = {};
        memory.all = ::operator new(floats * sizeof(float), kAlign);
        memory.floats = floats;
    }
    return static_cast<float*>(memory.all);
}

// Names of the kernels that this processor runs, the best first.
const std::string& runnable_names() {
    static const std::string names = [] {
        const Choices choices = runnable_kernels();
        std::string out;
        for (size_t i = 0; i < choices.count; i++) out += (i ? ", " : "") + std::string(choices.of[i]->name);
        return out;
    }();
    return names;
}

// Null where STREAMSPEC_KERNELS names none that this processor runs.
const Kernels* chosen() {
    static const Kernels* const kernels = choose_kernels(std::getenv("STREAMSPEC_KERNELS"));
    return kernels;
}

const Kernels& kernels() { return *chosen(); }  // there are no operators without (`RegisterCustomOps`)

template <typename T>
bool given(const ort::KernelInfo* info, const char* name, T* out) {
    ort::Status* status = api.attribute(info, name, out);
    if (status) api.release_status(status);
    return status == nullptr;
}

// An attribute, or `otherwise` where there is none; of another type, it is not taken for none.
template <typename T>
T attribute(const char* op, const ort::KernelInfo* info, const char* name, T otherwise) {
    T out = otherwise;
    int64_t whole = 0;
    float real = 0.0f;
    size_t length = 0;
    if (given(info, name, &out)) return out;
    if (given(info, name, &whole) || given(info, name, &real) || given(info, name, &length))
        fail(op, std::string(name) + " of another type", std::is_same_v<T, float> ? "a float" : "an int");
    return otherwise;
}

Tensor constant(const ort::KernelInfo* info, size_t index) {
    int is_constant = 0;
    const ort::Value* value = nullptr;
    if (ort::Status* status = api.constant_input(info, index, &is_constant, &value)) {
        api.release_status(status);  // an input left out
        return {};
    }
    return is_constant ? describe(value) : Tensor{};
}

// ---- linear maps

constexpr size_t kMostInputs = 1u << 17, kMostOutputs = 1u << 22;

// The values of `given` [outputs] in the order of the codes, padded with zeros to whole tiles.
std::vector<float> ordered(const Tensor& given, const Linear& map) {
    std::vector<float> out(map.tiles * kTile, 0.0f);
    for (size_t tile = 0; tile < map.tiles; tile++)
        for (size_t i = 0; i < kTile; i++) {
            const size_t half = map.outputs / 2;
            const size_t at = map.gated ? (i / kLanes) * half + tile * kLanes + i % kLanes : tile * kTile + i;
            if (at < map.outputs) out[tile * kTile + i] = given.as<float>()[at];
        }
    return out;
}

struct LinearMap {
    Linear map{};
    std::vector<float> scales, bias;
    std::vector<size_t> left_out;  // inputs

    // Weights and attributes of a node. Inputs from `first` on: codes, scales, then zeros (4 bits), then a bias.
    LinearMap(const char* op, const ort::KernelInfo* info, int bits, size_t first) {
        const Tensor codes = constant(info, first), scale = constant(info, first + 1);
        const size_t last = first + (bits == 4 ? 3 : 2);
        const Tensor zeros = bits == 4 ? constant(info, first + 2) : Tensor{}, shift = constant(info, last);
        for (size_t index = first + 2; index <= last; index++)
            if (!(index == last ? shift : zeros).there()) left_out.push_back(index);
        const auto whole = [&](const char* name, int64_t otherwise) { return attribute(op, info, name, otherwise); };
        const int64_t activation = whole("activation", 0);
        map.bits = bits;
        map.inputs = static_cast<size_t>(whole("in_features", 0));
        map.outputs = static_cast<size_t>(whole("out_features", 0));
        map.block = static_cast<size_t>(bits == 4 ? whole("block_size", 32) : 0);
        map.mix = static_cast<size_t>(whole("mix", 0));
        map.gated = whole("gated", 0) != 0;
        map.activation = static_cast<Activation>(activation);
        map.tiles = (map.outputs + kTile - 1) / kTile;
        const std::string inputs = std::to_string(map.inputs), outputs = std::to_string(map.outputs);
        if (map.inputs == 0 || map.inputs > kMostInputs || map.outputs == 0 || map.outputs > kMostOutputs)
            fail(op, "in_features " + inputs + " and out_features " + outputs,
                 "1 to " + std::to_string(kMostInputs) + " and 1 to " + std::to_string(kMostOutputs));
        if (map.mix != 0 && ((map.mix != 8 && map.mix != 16 && map.mix != 32) || map.inputs % map.mix != 0))
            fail(op, "mix " + std::to_string(map.mix) + " of " + inputs + " inputs", "0, or a divisor of 8, 16 or 32");
        if (activation < 0 || activation > static_cast<int64_t>(Activation::kRelu2))
            fail(op, "activation " + std::to_string(activation), "0 to 4");
        if (map.gated && map.outputs % kTile != 0) fail(op, "a gated map of " + outputs + " outputs", "a multiple of 32");
        if (!codes.there() || !scale.there()) fail(op, "codes or scales that are no constants", "constants");
        if (bits != 4) {
            if (bits == 8) expect(op, "codes", codes, ort::kInt8, {map.tiles, (map.inputs + 3) / 4, kTile, 4});
            else expect(op, "codes", codes, ort::kUint8, {map.tiles, (map.inputs + 15) / 16, 2, 3, kLanes, 4});
            expect(op, "scales", scale, ort::kFloat, {map.outputs});
            scales = ordered(scale, map);
            map.scales = scales.data();
        } else {
            if ((map.block != 32 && map.block != 64 && map.block != 128) || map.inputs % map.block != 0)
                fail(op, "block_size " + std::to_string(map.block) + " of " + inputs + " inputs", "a divisor of 32, 64 or 128");
            const size_t blocks = map.inputs / map.block;
            expect(op, "codes", codes, ort::kUint8, {map.tiles, map.inputs / 8, kTile, 4});
            expect(op, "scales", scale, ort::kFloat16, {map.tiles, blocks, kTile});
            if (zeros.there()) expect(op, "zero points", zeros, ort::kUint8, {map.tiles, blocks, kTile});
            map.block_scales = scale.as<uint16_t>();
            map.zeros = zeros.there() ? zeros.as<uint8_t>() : nullptr;
        }
        map.codes = codes.data;
        if (shift.there()) {
            expect(op, "a bias", shift, ort::kFloat, {map.outputs});
            bias = ordered(shift, map);
            map.bias = bias.data();
        }
    }
};

constexpr size_t kFewRows = 32;      // up to this many are prepared by one thread
constexpr size_t kSmallWork = 1 << 15;  // bytes of weights that one thread multiplies alone

template <int Bits>
struct LinearKernel : LinearMap {
    static constexpr const char* kName = Bits == 8 ? "LinearInt8" : Bits == 6 ? "LinearInt6" : "LinearInt4";
    explicit LinearKernel(const ort::KernelInfo* info) : LinearMap(kName, info, Bits, 1) {}

    void compute(const Call& call) {
        for (size_t index : left_out)
            if (call.value(index)) fail(kName, "zero points or a bias that are no constants", "constants");
        const Tensor x = call.input(0);
        if (x.type != ort::kFloat || x.dims.empty() || x.dim(1) != map.inputs)
            fail(kName, "rows " + shown(x), "float32 [.., " + std::to_string(map.inputs) + "]");
        Dims dims = x.dims;
        dims.back(map.width());
        float* y = call.output<float>(0, dims);
        multiply(call, x.as<float>(), x.count() / map.inputs, y);
    }

    void multiply(const Call& call, const float* x, size_t rows, float* y) const {
        if (rows == 0) return;
        const size_t stride = round_up(map.inputs, kRowAlign), blocks = Bits == 4 ? map.inputs / map.block : 1;
        const size_t floats = stride / 4 * rows + 3 * round_up(rows * blocks, kLanes);
        float* memory = scratch<0>(floats);
        Rows quantized{rows, stride, blocks, reinterpret_cast<int8_t*>(memory), memory + stride / 4 * rows, nullptr, nullptr};
        float* sums = quantized.scales + round_up(rows * blocks, kLanes);
        quantized.sums4 = sums;
        quantized.sums8 = reinterpret_cast<int32_t*>(sums + round_up(rows * blocks, kLanes));
        const size_t parts = rows <= kFewRows ? 1 : 8;
        call.parallel(parts, [&](size_t part) {
            kernels().quantize(map, x, rows * part / parts, rows * (part + 1) / parts, quantized, scratch<1>(stride));
        });
        const size_t bytes = map.tiles * kTile * map.inputs * Bits / 8;
        const size_t pieces = bytes * rows <= kSmallWork ? 1 : std::min(map.tiles, kPieces);
        call.parallel(pieces, [&](size_t piece) {
            kernels().linear(map, quantized, map.tiles * piece / pieces, map.tiles * (piece + 1) / pieces, y);
        });
    }
    static constexpr size_t kPieces = 16;
};

template <int Bits>
struct LookUpKernel : LinearMap {
    static constexpr const char* kName = Bits == 8 ? "EmbeddingInt8" : "EmbeddingInt6";
    explicit LookUpKernel(const ort::KernelInfo* info) : LinearMap(kName, info, Bits, 1) {
        if (map.gated) fail(kName, "a gated table", "gated 0");
    }
    void compute(const Call& call) {
        const Tensor ids = call.input(0);
        if (ids.type != ort::kInt64 || ids.dims.size() == kMostDims) fail(kName, "ids " + shown(ids), "int64, of 7 dimensions at most");
        Dims dims = ids.dims;
        dims.push_back(map.inputs);
        float* y = call.output<float>(0, dims);
        for (size_t i = 0; i < ids.count(); i++) {
            const int64_t given = ids.as<int64_t>()[i], rows = static_cast<int64_t>(map.outputs);
            const int64_t id = given < 0 ? given + rows : given;
            if (id < 0 || id >= rows) fail(kName, "id " + std::to_string(given), std::to_string(-rows) + " to " + std::to_string(rows - 1));
            float* row = scratch<1>(round_up(map.inputs, kRowAlign));
            kernels().look_up(map, static_cast<size_t>(id), row);
            std::memcpy(y + i * map.inputs, row, map.inputs * sizeof(float));
        }
    }
};

// Inputs: x, weight, update. Outputs: the norm of x + update, and x + update.
struct NormKernel {
    static constexpr const char* kName = "SkipRmsNorm";
    float eps;
    explicit NormKernel(const ort::KernelInfo* info) : eps(attribute(kName, info, "eps", 1e-6f)) {
        if (!(eps >= 0.0f && std::isfinite(eps))) fail(kName, "eps " + std::to_string(eps), "a number from 0");
    }

    void compute(const Call& call) {
        const Tensor x = call.input(0), weight = call.input(1), update = call.input(2);
        if (x.type != ort::kFloat || x.dims.empty() || x.dim(1) == 0 || x.dim(1) % kLanes != 0 || x.dim(1) > kMostInputs)
            fail(kName, "rows " + shown(x), "float32 rows of a multiple of 16 numbers, up to " + std::to_string(kMostInputs));
        const size_t width = x.dim(1), rows = x.count() / width;
        expect(kName, "a weight", weight, ort::kFloat, {width});
        if (update.there()) expect(kName, "an update", update, ort::kFloat, x.dims);
        float* y = call.output<float>(0, x.dims);
        float* sum = call.outputs > 1 ? call.output<float>(1, x.dims) : nullptr;
        const size_t parts = rows <= kFewRows ? 1 : 8;
        call.parallel(parts, [&](size_t part) {
            kernels().norm(x.as<float>(), update.there() ? update.as<float>() : nullptr, weight.as<float>(), eps, width,
                           rows * part / parts, rows * (part + 1) / parts, sum, y);
        });
    }
};

// Input: x [.., width]. Output: the place of the first of the largest of each row, int64 [..].
struct ArgMaxKernel {
    static constexpr const char* kName = "ArgMax";
    explicit ArgMaxKernel(const ort::KernelInfo*) {}

    void compute(const Call& call) {
        const Tensor x = call.input(0);
        if (x.type != ort::kFloat || x.dims.empty() || x.dim(1) == 0) fail(kName, "rows " + shown(x), "float32 [.., 1 or more]");
        const size_t width = x.dim(1), rows = x.count() / width;
        Dims dims = x.dims;
        dims.pop_back();
        int64_t* y = call.output<int64_t>(0, dims);
        call.parallel(rows, [&](size_t row) {
            y[row] = static_cast<int64_t>(kernels().argmax(x.as<float>() + row * width, width));
        });
    }
};

// ---- attention

// Inputs: packed, bias, [past_length,] keys, values, cos, sin, query norm, key norm[, rows of each sequence]. `Writes`: keys
// and values of the rows go into the cache, which is also an output; else they are further columns where attribute `own` is
// 1. Several sequences have a cache each, [sequences, ..], as many past lengths, and rows one sequence after the other.
template <bool Writes, bool Half>
struct AttentionKernel {
    static constexpr const char* kName =
        Writes ? (Half ? "AttentionFloat16" : "Attention") : (Half ? "DraftAttentionFloat16" : "DraftAttention");
    Attention base{};
    bool own = false;

    explicit AttentionKernel(const ort::KernelInfo* info) {
        const auto whole = [&](const char* name) { return attribute<int64_t>(kName, info, name, 0); };
        const auto real = [&](const char* name, float otherwise) {
            const float out = attribute(kName, info, name, otherwise);
            if (!std::isfinite(out)) fail(kName, name + (" " + std::to_string(out)), "a finite number");
            return out;
        };
        base.heads = static_cast<size_t>(whole("heads"));
        base.kv_heads = static_cast<size_t>(whole("kv_heads"));
        base.width = static_cast<size_t>(whole("width"));
        base.scale = real("scale", 1.0f);
        base.cap = real("cap", 0.0f);
        base.eps = real("eps", 1e-6f);
        base.ring = whole("ring") != 0;
        base.interleaved = whole("interleaved") != 0;
        base.norm_last = whole("norm_last") != 0;
        base.half = Half;
        base.write = Writes;
        own = Writes || whole("own") != 0;
        const size_t heads = base.heads, keys = base.kv_heads;
        if (heads == 0 || keys == 0 || heads > 1024 || heads % keys != 0 || heads / keys > kMostGroup)
            fail(kName, std::to_string(heads) + " heads, " + std::to_string(keys) + " key heads",
                 "up to 1024 heads, up to " + std::to_string(kMostGroup) + " to a key head");
        if (base.width == 0 || base.width % kLanes != 0 || base.width > kMostWidth)
            fail(kName, "a head width of " + std::to_string(base.width), "a multiple of 16 up to " + std::to_string(kMostWidth));
        if (base.cap < 0.0f || base.eps < 0.0f) fail(kName, "a negative cap or eps", "numbers from 0");
    }

    void compute(const Call& call) {
        Attention a = base;
        size_t at = 0;
        const Tensor packed = call.input(at++), bias = call.input(at++);
        const Tensor past = Writes ? call.input(at++) : Tensor{};
        const Tensor keys = call.input(at), values = call.input(at + 1), cos = call.input(at + 2), sin = call.input(at + 3);
        const Tensor query_norm = call.input(at + 4), key_norm = call.input(at + 5);
        const size_t queries_width = a.heads * a.width, keys_width = own ? a.kv_heads * a.width : 0;
        a.packed_stride = queries_width + 2 * keys_width;
        a.rows = packed.dims.size() == 3 ? packed.dim(2) : 0;
        expect(kName, "packed rows", packed, ort::kFloat, {1, a.rows, a.packed_stride});
        a.slots = keys.dims.size() == 4 ? keys.dim(2) : 0;
        const Tensor counts = Writes ? call.input(at + 6) : Tensor{};
        const size_t sequences = Writes && counts.there() && keys.dims.size() == 4 ? keys.dim(4) : 1;
        for (const Tensor* side : {&keys, &values})
            expect(kName, side == &keys ? "keys" : "values", *side, Half ? ort::kFloat16 : ort::kFloat, {sequences, a.kv_heads, a.slots, a.width});
        a.own = !Writes && own ? a.rows : 0;
        const size_t columns = bias.dims.size() < 2 ? 0 : bias.dim(1), least = a.rows ? std::max<size_t>(1, a.own) : 0;
        const size_t most = sequences == 1 ? a.slots + a.own : a.slots + a.rows;
        if (bias.type != ort::kFloat || bias.dims.size() < 2 || bias.dim(2) != a.rows || bias.count() != a.rows * columns ||
            columns < least || columns > most)
            fail(kName, "a bias " + shown(bias), "float32 [.., " + std::to_string(a.rows) + ", " + std::to_string(least) + " to " + std::to_string(most) + "]");
        a.used = columns - a.own;
        if (Writes && sequences == 1) {
            if (past.type != ort::kInt64 || past.count() != 1) fail(kName, "a past length " + shown(past), "one int64");
            const int64_t length = past.as<int64_t>()[0];
            a.past = static_cast<size_t>(length);
            if (length < 0 || a.rows > a.slots || (!a.ring && a.past > a.slots - a.rows))
                fail(kName, std::to_string(a.rows) + " rows after " + std::to_string(length) + " slots", "as many as a cache of " + std::to_string(a.slots) + " slots has left");
        }
        if (cos.there() || sin.there()) {
            const size_t half = cos.dims.size() == 2 ? cos.dim(1) : 0;
            if (2 * half > a.width) fail(kName, "cos " + shown(cos), "up to " + std::to_string(a.width / 2) + " numbers a row");
            expect(kName, "cos", cos, ort::kFloat, {a.rows, half});
            expect(kName, "sin", sin, ort::kFloat, {a.rows, half});
            a.rotated = 2 * half;
            a.cos = cos.as<float>();
            a.sin = sin.as<float>();
        }
        for (const Tensor* weight : {&query_norm, &key_norm})
            if (weight->there()) expect(kName, weight == &query_norm ? "a norm of queries" : "a norm of keys", *weight, ort::kFloat, {a.width});
        a.query_norm = query_norm.there() ? query_norm.as<float>() : nullptr;
        a.key_norm = key_norm.there() ? key_norm.as<float>() : nullptr;
        a.packed = packed.as<float>();
        a.key_at = queries_width;
        a.value_at = queries_width + keys_width;
        a.bias = bias.as<float>();
        a.keys = const_cast<void*>(keys.data);
        a.values = const_cast<void*>(values.data);
        a.mixed = call.output<float>(0, {1, packed.dims[1], queries_width});
        if (Writes) {
            a.keys = present(call, 1, keys);
            a.values = present(call, 2, values);
        }
        if (a.rows == 0) return;
        if (a.own) a.own_keys = scratch<2>(a.kv_heads * a.own * a.width);
        if (sequences == 1) return run(call, &a, 1);
        const std::vector<Attention> each = apart(a, past, counts, sequences);
        run(call, each.data(), each.size());
    }

    // The sequences of a call that have rows. Of the bias [rows, longest past + rows] each sees as many columns from the first
    // as it has past slots, and those of its own rows.
    std::vector<Attention> apart(const Attention& all, const Tensor& past, const Tensor& counts, size_t sequences) const {
        expect(kName, "past lengths", past, ort::kInt64, {sequences});
        expect(kName, "rows of each sequence", counts, ort::kInt64, {sequences});
        if (all.ring) fail(kName, "a ring of several sequences", "one");
        const size_t columns = all.used;
        if (columns < all.rows)
            fail(kName, "a bias of " + std::to_string(columns) + " columns", "a column of each of " + std::to_string(all.rows) + " rows");
        const size_t longest = columns - all.rows, last = std::min(longest, all.slots);
        const size_t cache = all.kv_heads * all.slots * all.width * (Half ? 2 : 4);
        std::vector<Attention> out;
        size_t row = 0, floats = 0;
        for (size_t i = 0; i < sequences; i++) {
            const int64_t rows = counts.as<int64_t>()[i], length = past.as<int64_t>()[i];
            const size_t left = all.rows - row;
            if (rows < 0 || static_cast<size_t>(rows) > left || length < 0 || static_cast<size_t>(length) > last ||
                static_cast<size_t>(rows + length) > all.slots)
                fail(kName, std::to_string(rows) + " rows of a sequence after " + std::to_string(length) + " slots",
                     "up to " + std::to_string(left) + " after up to " + std::to_string(last));
            if (rows == 0) continue;
            Attention a = all;
            a.rows = static_cast<size_t>(rows);
            a.past = static_cast<size_t>(length);
            a.used = a.past + a.rows;
            a.packed += row * all.packed_stride;
            a.mixed += row * all.heads * all.width;
            if (a.cos) {
                a.cos += row * (all.rotated / 2);
                a.sin += row * (all.rotated / 2);
            }
            a.keys = static_cast<char*>(all.keys) + i * cache;
            a.values = static_cast<char*>(all.values) + i * cache;
            row += a.rows;
            floats += a.rows * a.used;
            out.push_back(a);
        }
        if (row != all.rows) fail(kName, std::to_string(row) + " rows of all sequences", std::to_string(all.rows));
        float* own = scratch<3>(floats);
        row = 0;
        for (Attention& a : out) {
            for (size_t i = 0; i < a.rows; i++) {
                const float* from = all.bias + (row + i) * columns;
                std::memcpy(own + i * a.used, from, a.past * sizeof(float));
                std::memcpy(own + i * a.used + a.past, from + longest + row, a.rows * sizeof(float));
            }
            a.bias = own;
            own += a.rows * a.used;
            row += a.rows;
        }
        return out;
    }

    // The cache as an output: in place where the caller bound past and present to one memory.
    static void* present(const Call& call, size_t index, const Tensor& past) {
        char* out = call.output<char>(index, past.dims);
        if (out != past.data) std::memmove(out, past.data, past.count() * (Half ? 2 : 4));
        return out;
    }

    void run(const Call& call, const Attention* all, size_t count) const {
        for (size_t i = 0; own && i < count; i++) {
            const Attention& a = all[i];
            const size_t parts = a.rows <= kFewRows ? 1 : 8;
            call.parallel(parts, [&](size_t part) {
                kernels().store_keys(a, a.rows * part / parts, a.rows * (part + 1) / parts);
            });
        }
        size_t tiles = 0, work = 0;
        for (size_t i = 0; i < count; i++) {
            tiles += all[i].kv_heads * tiles_of(all[i]);
            work += all[i].rows * (all[i].used + all[i].own) * all[i].heads;
        }
        const auto tile = [&](size_t index) {
            const Attention* a = all;
            while (index >= a->kv_heads * tiles_of(*a)) index -= a->kv_heads * tiles_of(*a), a++;
            const size_t height = height_of(*a), each = tiles_of(*a), from = index % each * height;
            kernels().attend(*a, index / each, from, std::min(a->rows, from + height), scratch<1>(attention_scratch(*a, height)));
        };
        if (work < 4096)
            for (size_t i = 0; i < tiles; i++) tile(i);
        else
            call.parallel(tiles, tile);
    }

    // Rows that are attended for at once, and how many times.
    static size_t height_of(const Attention& a) {
        const size_t group = a.heads / a.kv_heads, most = std::max<size_t>(1, 24 / group);
        return std::min(most, a.rows * a.used * group > 2048 ? (a.rows + 1) / 2 : a.rows);
    }
    static size_t tiles_of(const Attention& a) { return (a.rows + height_of(a) - 1) / height_of(a); }
};

// ---- registration

// Runs body; no exception crosses the C interface.
template <typename Body>
ort::Status* guarded(const Body& body) {
    try {
        body();
        return nullptr;
    } catch (const Failure& failure) {
        return api.create_status(ort::kInvalidArgument, failure.text.c_str());
    } catch (const std::exception& error) {
        return api.create_status(ort::kFail, error.what());
    } catch (...) {
        return api.create_status(ort::kFail, "unknown error");
    }
}

template <typename Kernel>
struct Op : ort::CustomOp {
    struct Sides {
        std::vector<int> inputs, outputs;
        size_t required, given = SIZE_MAX;  // inputs, outputs that are always there
    } sides;

    explicit Op(Sides given) : ort::CustomOp{}, sides(std::move(given)) {
        version = ort::kCustomOpVersion;
        GetName = [](const CustomOp*) { return Kernel::kName; };
        GetExecutionProviderType = [](const CustomOp*) -> const char* { return nullptr; };
        GetInputType = [](const CustomOp* op, size_t i) { return of(op).sides.inputs[i]; };
        GetInputTypeCount = [](const CustomOp* op) { return of(op).sides.inputs.size(); };
        GetOutputType = [](const CustomOp* op, size_t i) { return of(op).sides.outputs[i]; };
        GetOutputTypeCount = [](const CustomOp* op) { return of(op).sides.outputs.size(); };
        GetInputCharacteristic = [](const CustomOp* op, size_t i) -> int {
            return i < of(op).sides.required ? ort::kRequired : ort::kOptional;
        };
        GetOutputCharacteristic = [](const CustomOp* op, size_t i) -> int {
            return i < of(op).sides.given ? ort::kRequired : ort::kOptional;
        };
        GetInputMemoryType = [](const CustomOp*, size_t) { return 0; };
        const auto one = [](const CustomOp*) { return 1; };
        GetVariadicInputMinArity = GetVariadicInputHomogeneity = one;
        GetVariadicOutputMinArity = GetVariadicOutputHomogeneity = one;
        KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
        CreateKernelV2 = [](const CustomOp*, const void*, const ort::KernelInfo* info, void** out) {
            return guarded([&] { *out = new Kernel(info); });
        };
        KernelComputeV2 = [](void* kernel, ort::KernelContext* context) {
            return guarded([&] { static_cast<Kernel*>(kernel)->compute(Call(context)); });
        };
    }

    static const Op& of(const CustomOp* op) { return *static_cast<const Op*>(op); }
};

template <bool Writes, bool Half>
typename Op<AttentionKernel<Writes, Half>>::Sides attention_sides() {
    const int cache = Half ? ort::kFloat16 : ort::kFloat, f = ort::kFloat;
    if (Writes) return {{f, f, ort::kInt64, cache, cache, f, f, f, f, ort::kInt64}, {f, cache, cache}, 5};
    return {{f, f, cache, cache, f, f, f, f}, {f}, 4};
}

template <bool Writes, bool Half>
const ort::CustomOp* attention() {
    static const Op<AttentionKernel<Writes, Half>> op(attention_sides<Writes, Half>());
    return &op;
}

std::vector<const ort::CustomOp*> operators() {
    const int f = ort::kFloat;
    static const Op<LinearKernel<8>> linear8({{f, ort::kInt8, f, f}, {f}, 3});
    static const Op<LinearKernel<6>> linear6({{f, ort::kUint8, f, f}, {f}, 3});
    static const Op<LinearKernel<4>> linear4({{f, ort::kUint8, ort::kFloat16, ort::kUint8, f}, {f}, 3});
    static const Op<LookUpKernel<8>> table8({{ort::kInt64, ort::kInt8, f}, {f}, 3});
    static const Op<LookUpKernel<6>> table6({{ort::kInt64, ort::kUint8, f}, {f}, 3});
    static const Op<NormKernel> norm({{f, f, f}, {f, f}, 2, 1});
    static const Op<ArgMaxKernel> argmax({{f}, {ort::kInt64}, 1});
    return {&linear8, &linear6, &linear4, &table8, &table6, &norm, &argmax, attention<true, false>(), attention<true, true>(), attention<false, false>(), attention<false, true>()};
}

}  // namespace
}  // namespace streamspec

STREAMSPEC_EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
    using namespace streamspec;
    const void* const* table = base->GetApi(ort::kApiVersion);
    if (table == nullptr) return nullptr;  // older than the first with all functions; the graph's operators are then unknown
    static const void* const* const first = api.table = table;
    if (table != first) return ort::Api{table}.create_status(ort::kFail, "streamspec: two ONNX Runtimes in one process");
    return guarded([&] {
        if (chosen() == nullptr) throw Failure{"STREAMSPEC_KERNELS names none of " + runnable_names()};
        static ort::CustomOpDomain* const domain = [] {  // lives as long as the process: sessions refer to it
            ort::CustomOpDomain* out = nullptr;
            check(api.create_domain("streamspec", &out));
            for (const ort::CustomOp* op : operators()) check(api.add_op(out, op));
            return out;
        }();
        check(api.add_domain(options, domain));
    });
}

// The name of the instruction set in use; "" where STREAMSPEC_KERNELS names none that this processor runs.
STREAMSPEC_EXPORT const char* streamspec_kernels() {
    const streamspec::Kernels* const kernels = streamspec::chosen();
    return kernels ? kernels->name : "";
}

// Names of those that this processor runs, the best first.
STREAMSPEC_EXPORT const char* streamspec_runnable_kernels() { return streamspec::runnable_names().c_str(); }
