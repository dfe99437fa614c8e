#include "operators/tensor.h"

namespace streamspec {

ort::Api api;

void fail(const char* op, const std::string& found, const std::string& expected) {
    throw Failure{std::string(op) + ": " + found + ", expected " + expected};
}

void check(ort::Status* status) {
    if (status == nullptr) return;
    api.release_status(status);
    throw Failure{"ONNX Runtime refused a call of its interface"};
}

Tensor tensor_of(const ort::Value* value) {
    Tensor out;
    if (value == nullptr) return out;
    const int64_t* dims = nullptr;
    size_t rank = 0;
    check(api.tensor_type(value, &out.type, &dims, &rank));
    if (rank > kMaxDims) throw Failure{"a tensor of more than 8 dimensions"};
    out.dims = Dims(dims, rank);
    void* data = nullptr;
    check(api.tensor_data(value, &data));
    static const char nothing = 0;  // a tensor without elements may have no memory
    out.data = data ? data : &nothing;
    return out;
}

namespace {

std::string type_name(int type) {
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

std::string to_text(int type, const Dims& dims) {
    std::string out;
    for (size_t i = 0; i < dims.size(); i++) out += (i ? ", " : "") + std::to_string(dims[i]);
    return type_name(type) + " [" + out + "]";
}

}  // namespace

std::string to_text(const Tensor& tensor) {
    return tensor.exists() ? to_text(tensor.type, tensor.dims) : "nothing";
}

void expect(const char* op, const char* what, const Tensor& tensor, int type, const Dims& dims) {
    if (tensor.type == type && tensor.dims == dims) return;
    fail(op, std::string(what) + " " + to_text(tensor), to_text(type, dims));
}

int64_t past_length_of(const char* op, const Tensor& tensor) {
    if (tensor.type != ort::kInt64 || tensor.count() != 1)
        fail(op, "a past length " + to_text(tensor), "one int64");
    return *tensor.as<int64_t>();
}

}  // namespace streamspec
