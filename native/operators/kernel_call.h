// What a kernel sees of ONNX Runtime: attributes and constants of its node, and inputs, outputs,
// threads and memory of a call.
#pragma once

#include <atomic>
#include <cmath>
#include <new>
#include <string>
#include <type_traits>

#include "kernels/kernels.h"
#include "operators/tensor.h"

namespace streamspec {

// Inputs, outputs and threads of one call of an operator.
class Call {
  public:
    explicit Call(ort::KernelContext* context) : context_(context) {
        check(api.input_count(context, &inputs_));
        check(api.output_count(context, &outputs_));
    }
    size_t outputs() const { return outputs_; }
    Tensor input(size_t index) const { return tensor_of(value(index)); }
    const ort::Value* value(size_t index) const {  // null where it was left out
        const ort::Value* out = nullptr;
        if (index < inputs_) check(api.input(context_, index, &out));
        return out;
    }
    template <typename T>
    T* output(size_t index, const Dims& dims) const {
        ort::Value* value = nullptr;
        check(api.output(context_, index, dims.data(), dims.size(), &value));
        void* data = nullptr;
        if (value) check(api.tensor_data(value, &data));
        return static_cast<T*>(data);
    }
    // Runs body(0) .. body(total - 1) on the session's threads. They are not ours: an exception,
    // for want of memory, is remembered and thrown here.
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
            Work& shared = *static_cast<Work*>(data);
            try {
                shared.body(index);
            } catch (...) {
                shared.failed = true;
            }
        };
        check(api.parallel_for(context_, run, total, &work));
        if (work.failed) throw Failure{"out of memory"};
    }
    // Runs body(from, to) over `rows` rows: few are prepared by one thread.
    template <typename Body>
    void parallel_rows(size_t rows, const Body& body) const {
        constexpr size_t kFewRows = 32, kChunks = 8;
        const size_t chunks = rows <= kFewRows ? 1 : kChunks;
        parallel(chunks,
                 [&](size_t chunk) { body(rows * chunk / chunks, rows * (chunk + 1) / chunks); });
    }

  private:
    ort::KernelContext* context_;
    size_t inputs_ = 0, outputs_ = 0;
};

// kTask: of what one thread does
enum class Scratch { kQuantizedRows, kTask, kRowKeys, kBias, kGroupedRows };

// Memory of one thread that stays allocated between calls: as much as the largest took. Holds
// what is written to it, of any type. STREAMSPEC_EXACT_SCRATCH: as much as this call takes, for a
// sanitizer to see where it ends.
template <Scratch Use>
float* scratch(size_t floats) {
    constexpr std::align_val_t kAlign{kRowAlign};
    struct Memory {
        void* data = nullptr;
        size_t floats = 0;
        ~Memory() { ::operator delete(data, kAlign); }
    };
    thread_local Memory memory;
#ifdef STREAMSPEC_EXACT_SCRATCH
    const bool fits = memory.floats == floats;
#else
    const bool fits = memory.floats >= floats;
#endif
    if (!fits) {
        ::operator delete(memory.data, kAlign);
        memory.data = nullptr;
        memory.floats = 0;
        memory.data = ::operator new(floats * sizeof(float), kAlign);
        memory.floats = floats;
    }
    return static_cast<float*>(memory.data);
}

// Reads an attribute of T's type; false where there is none.
template <typename T>
bool read_attribute(const ort::KernelInfo* info, const char* name, T* out) {
    ort::Status* status = api.attribute(info, name, out);
    if (status) api.release_status(status);
    return status == nullptr;
}

// An attribute, or `otherwise` where there is none; of another type, it is not taken for none.
template <typename T>
T attribute(const char* op, const ort::KernelInfo* info, const char* name, T otherwise) {
    T out = otherwise;
    if (read_attribute(info, name, &out)) return out;
    int64_t integer = 0;
    float number = 0.0f;
    size_t length = 0;
    if (read_attribute(info, name, &integer) || read_attribute(info, name, &number) ||
        read_attribute(info, name, &length))
        fail(op, std::string(name) + " of another type",
             std::is_same_v<T, float> ? "a float" : "an int");
    return otherwise;
}

// A size: negative ones are too large for every check.
inline size_t size_attribute(const char* op, const ort::KernelInfo* info, const char* name,
                             int64_t otherwise = 0) {
    return static_cast<size_t>(attribute(op, info, name, otherwise));
}

inline bool flag_attribute(const char* op, const ort::KernelInfo* info, const char* name) {
    return attribute<int64_t>(op, info, name, 0) != 0;
}

inline float finite_attribute(const char* op, const ort::KernelInfo* info, const char* name,
                              float otherwise) {
    const float out = attribute(op, info, name, otherwise);
    if (!std::isfinite(out)) fail(op, name + (" " + std::to_string(out)), "a finite number");
    return out;
}

// A constant input; none where it is computed or was left out.
inline Tensor constant(const ort::KernelInfo* info, size_t index) {
    int is_constant = 0;
    const ort::Value* value = nullptr;
    if (ort::Status* status = api.constant_input(info, index, &is_constant, &value)) {
        api.release_status(status);  // an input left out
        return {};
    }
    return is_constant ? tensor_of(value) : Tensor{};
}

}  // namespace streamspec
