// Tensors as operators see them, and the checks of their types and shapes: what does not fit is a
// Failure, one line of what was found and what was expected.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "operators/ort_api.h"

namespace streamspec {

extern ort::Api api;  // of the process's ONNX Runtime, from registration on

struct Failure {
    std::string text;
};

[[noreturn]] void fail(const char* op, const std::string& found, const std::string& expected);

// Throws a Failure where a call of ONNX Runtime's interface returned an error.
void check(ort::Status* status);

constexpr size_t kMaxDims = 8;

// A shape, in memory of its own: operators take microseconds, and some have nine inputs.
class Dims {
  public:
    Dims() = default;
    Dims(std::initializer_list<size_t> dims) {
        for (size_t dim : dims) push_back(dim);
    }
    Dims(const int64_t* dims, size_t count) : size_(count) {
        std::copy(dims, dims + count, values_);
    }
    size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }
    const int64_t* data() const { return values_; }
    size_t operator[](size_t axis) const { return static_cast<size_t>(values_[axis]); }
    void set_back(size_t dim) { values_[size_ - 1] = static_cast<int64_t>(dim); }
    void push_back(size_t dim) { values_[size_++] = static_cast<int64_t>(dim); }
    void pop_back() { size_--; }
    bool operator==(const Dims& other) const {
        return std::equal(values_, values_ + size_, other.values_, other.values_ + other.size_);
    }

  private:
    int64_t values_[kMaxDims];
    size_t size_ = 0;
};

// A view of a value's memory; without data where an input was left out.
struct Tensor {
    const void* data = nullptr;
    int type = 0;
    Dims dims;

    bool exists() const { return data != nullptr; }
    template <typename T>
    const T* as() const {
        return static_cast<const T*>(data);
    }
    // Null where the input was left out.
    const float* floats() const { return as<float>(); }
    // `from_end`: 1 is the last.
    size_t dim(size_t from_end) const { return dims[dims.size() - from_end]; }
    size_t count() const {
        size_t out = 1;
        for (size_t i = 0; i < dims.size(); i++) out *= dims[i];
        return out;
    }
};

// The tensor of a value, or none of null.
Tensor tensor_of(const ort::Value* value);

// Type and shape, as messages show them: "float32 [3, 40]".
std::string to_text(const Tensor& tensor);

// Fails unless the tensor has this type and this shape.
void expect(const char* op, const char* what, const Tensor& tensor, int type, const Dims& dims);

// The number of committed rows that a tensor holds. Fails unless it is one int64.
int64_t past_length_of(const char* op, const Tensor& tensor);

}  // namespace streamspec
