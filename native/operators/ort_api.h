// The part of ONNX Runtime's stable C interface that custom operators use. The interface only grows
// at its end, so functions are found by their place in the table (counted from 0;
// `onnxruntime_c_api.h` of any release has them in this order). Version 24 is asked for, of ONNX
// Runtime 1.24: the first that tells shapes without memory of its own.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(_WIN32)
#define STREAMSPEC_EXPORT extern "C" __declspec(dllexport)
#else
#define STREAMSPEC_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace ort {

struct Status;
struct Value;
struct KernelInfo;
struct KernelContext;
struct SessionOptions;
struct CustomOpDomain;

constexpr uint32_t kApiVersion = 24;
constexpr uint32_t kCustomOpVersion = 16;  // the first whose kernels report errors
enum ErrorCode : int { kFail = 1, kInvalidArgument = 2, kInvalidGraph = 10 };
enum ElementType : int { kFloat = 1, kUint8 = 2, kInt8 = 3, kInt64 = 7, kFloat16 = 10 };
enum Characteristic : int { kRequired = 0, kOptional = 1 };

struct ApiBase {
    const void* const* (*GetApi)(uint32_t version);
    const char* (*GetVersionString)();
};

// Places of functions in the table.
enum Place : size_t {
    kCreateStatus = 0,
    kCreateCustomOpDomain = 26,
    kCustomOpDomain_Add = 27,
    kAddCustomOpDomain = 28,
    kGetTensorMutableData = 51,
    kKernelInfoGetAttribute_float = 85,
    kKernelInfoGetAttribute_int64 = 86,
    kKernelInfoGetAttribute_string = 87,
    kKernelContext_GetInputCount = 88,
    kKernelContext_GetOutputCount = 89,
    kKernelContext_GetInput = 90,
    kKernelContext_GetOutput = 91,
    kReleaseStatus = 93,
    kKernelInfoGetConstantInput_tensor = 249,
    kKernelContext_ParallelFor = 274,
    kGetTensorElementTypeAndShapeDataReference = 414,
};

struct Api {
    const void* const* table = nullptr;

    Status* create_status(ErrorCode code, const char* text) const {
        return at<Status* (*)(ErrorCode, const char*)>(kCreateStatus)(code, text);
    }
    void release_status(Status* status) const { at<void (*)(Status*)>(kReleaseStatus)(status); }
    Status* create_domain(const char* name, CustomOpDomain** out) const {
        return at<Status* (*)(const char*, CustomOpDomain**)>(kCreateCustomOpDomain)(name, out);
    }
    Status* add_op(CustomOpDomain* domain, const struct CustomOp* op) const {
        return at<Status* (*)(CustomOpDomain*, const CustomOp*)>(kCustomOpDomain_Add)(domain, op);
    }
    Status* add_domain(SessionOptions* options, CustomOpDomain* domain) const {
        return at<Status* (*)(SessionOptions*, CustomOpDomain*)>(kAddCustomOpDomain)(options,
                                                                                     domain);
    }
    Status* tensor_data(const Value* value, void** out) const {
        return at<Status* (*)(const Value*, void**)>(kGetTensorMutableData)(value, out);
    }
    // Type, dimensions, which are the value's own, and how many.
    Status* tensor_type(const Value* value, int* type, const int64_t** dims, size_t* rank) const {
        return at<Status* (*)(const Value*, int*, const int64_t**, size_t*)>(
            kGetTensorElementTypeAndShapeDataReference)(value, type, dims, rank);
    }
    Status* attribute(const KernelInfo* info, const char* name, float* out) const {
        return at<Status* (*)(const KernelInfo*, const char*, float*)>(
            kKernelInfoGetAttribute_float)(info, name, out);
    }
    Status* attribute(const KernelInfo* info, const char* name, int64_t* out) const {
        return at<Status* (*)(const KernelInfo*, const char*, int64_t*)>(
            kKernelInfoGetAttribute_int64)(info, name, out);
    }
    Status* attribute(const KernelInfo* info, const char* name,
                      size_t* length) const {  // of a text
        return at<Status* (*)(const KernelInfo*, const char*, char*, size_t*)>(
            kKernelInfoGetAttribute_string)(info, name, nullptr, length);
    }
    Status* constant_input(const KernelInfo* info, size_t index, int* is_constant,
                           const Value** out) const {
        return at<Status* (*)(const KernelInfo*, size_t, int*, const Value**)>(
            kKernelInfoGetConstantInput_tensor)(info, index, is_constant, out);
    }
    Status* input_count(const KernelContext* context, size_t* out) const {
        return at<Status* (*)(const KernelContext*, size_t*)>(kKernelContext_GetInputCount)(context,
                                                                                            out);
    }
    Status* output_count(const KernelContext* context, size_t* out) const {
        return at<Status* (*)(const KernelContext*, size_t*)>(kKernelContext_GetOutputCount)(
            context, out);
    }
    Status* input(const KernelContext* context, size_t index, const Value** out) const {
        return at<Status* (*)(const KernelContext*, size_t, const Value**)>(
            kKernelContext_GetInput)(context, index, out);
    }
    Status* output(KernelContext* context, size_t index, const int64_t* dims, size_t count,
                   Value** out) const {
        return at<Status* (*)(KernelContext*, size_t, const int64_t*, size_t, Value**)>(
            kKernelContext_GetOutput)(context, index, dims, count, out);
    }
    Status* parallel_for(const KernelContext* context, void (*body)(void*, size_t), size_t total,
                         void* data) const {
        return at<Status* (*)(const KernelContext*, void (*)(void*, size_t), size_t, size_t,
                              void*)>(kKernelContext_ParallelFor)(context, body, total, 0, data);
    }

  private:
    template <typename Function>
    Function at(Place place) const {
        return reinterpret_cast<Function>(const_cast<void*>(table[place]));
    }
};

// `OrtCustomOp` up to version 16.
struct CustomOp {
    uint32_t version;
    void* (*CreateKernel)(const CustomOp*, const void* api, const KernelInfo*);
    const char* (*GetName)(const CustomOp*);
    const char* (*GetExecutionProviderType)(const CustomOp*);
    int (*GetInputType)(const CustomOp*, size_t);
    size_t (*GetInputTypeCount)(const CustomOp*);
    int (*GetOutputType)(const CustomOp*, size_t);
    size_t (*GetOutputTypeCount)(const CustomOp*);
    void (*KernelCompute)(void*, KernelContext*);
    void (*KernelDestroy)(void*);
    int (*GetInputCharacteristic)(const CustomOp*, size_t);
    int (*GetOutputCharacteristic)(const CustomOp*, size_t);
    int (*GetInputMemoryType)(const CustomOp*, size_t);
    int (*GetVariadicInputMinArity)(const CustomOp*);
    int (*GetVariadicInputHomogeneity)(const CustomOp*);
    int (*GetVariadicOutputMinArity)(const CustomOp*);
    int (*GetVariadicOutputHomogeneity)(const CustomOp*);
    Status* (*CreateKernelV2)(const CustomOp*, const void* api, const KernelInfo*, void** kernel);
    Status* (*KernelComputeV2)(void* kernel, KernelContext*);
};

}  // namespace ort
