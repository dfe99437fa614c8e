// ONNX Runtime's table of functions for an operator, over a kernel type: `kName`, a constructor
// that reads the node's attributes and constants, and compute(Call).
#pragma once

#include <exception>
#include <utility>
#include <vector>

#include "operators/kernel_call.h"

namespace streamspec {

// The operators of each file; they live as long as the process.
std::vector<const ort::CustomOp*> linear_operators();
std::vector<const ort::CustomOp*> experts_operators();
std::vector<const ort::CustomOp*> row_operators();
std::vector<const ort::CustomOp*> attention_operators();
std::vector<const ort::CustomOp*> recurrent_operators();
std::vector<const ort::CustomOp*> convolution_operators();

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

// Element types of inputs and outputs, and how many of them may not be left out.
struct Signature {
    std::vector<int> inputs, outputs;
    size_t required_inputs;
    size_t required_outputs = SIZE_MAX;
};

template <typename Kernel>
class Op : public ort::CustomOp {
  public:
    explicit Op(Signature signature) : ort::CustomOp{}, signature_(std::move(signature)) {
        version = ort::kCustomOpVersion;
        GetName = [](const CustomOp*) { return Kernel::kName; };
        GetExecutionProviderType = [](const CustomOp*) -> const char* { return nullptr; };
        GetInputType = [](const CustomOp* op, size_t i) { return of(op).inputs[i]; };
        GetInputTypeCount = [](const CustomOp* op) { return of(op).inputs.size(); };
        GetOutputType = [](const CustomOp* op, size_t i) { return of(op).outputs[i]; };
        GetOutputTypeCount = [](const CustomOp* op) { return of(op).outputs.size(); };
        GetInputCharacteristic = [](const CustomOp* op, size_t i) -> int {
            return i < of(op).required_inputs ? ort::kRequired : ort::kOptional;
        };
        GetOutputCharacteristic = [](const CustomOp* op, size_t i) -> int {
            return i < of(op).required_outputs ? ort::kRequired : ort::kOptional;
        };
        GetInputMemoryType = [](const CustomOp*, size_t) { return 0; };
        const auto always_1 = [](const CustomOp*) { return 1; };
        GetVariadicInputMinArity = GetVariadicInputHomogeneity = always_1;
        GetVariadicOutputMinArity = GetVariadicOutputHomogeneity = always_1;
        KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
        CreateKernelV2 = [](const CustomOp*, const void*, const ort::KernelInfo* info, void** out) {
            return guarded([&] { *out = new Kernel(info); });
        };
        KernelComputeV2 = [](void* kernel, ort::KernelContext* context) {
            return guarded([&] { static_cast<Kernel*>(kernel)->compute(Call(context)); });
        };
    }

  private:
    static const Signature& of(const CustomOp* op) {
        return static_cast<const Op*>(op)->signature_;
    }

    Signature signature_;
};

}  // namespace streamspec
