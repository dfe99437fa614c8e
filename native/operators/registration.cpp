// Registers the operators of the domain `streamspec` (docs/reference/native-operators.md) with
// ONNX Runtime, and says which kernels they run.
#include "operators/custom_op.h"

namespace streamspec {
namespace {

// A domain with all operators, which lives as long as the process: sessions refer to it.
ort::CustomOpDomain* make_domain() {
    ort::CustomOpDomain* out = nullptr;
    check(api.create_domain("streamspec", &out));
    for (const auto& operators :
         {linear_operators(), experts_operators(), row_operators(), attention_operators(),
          recurrent_operators(), convolution_operators()})
        for (const ort::CustomOp* op : operators) check(api.add_op(out, op));
    return out;
}

}  // namespace
}  // namespace streamspec

// ONNX Runtime calls it by this name.
STREAMSPEC_EXPORT ort::Status* RegisterCustomOps(  // NOLINT(readability-identifier-naming)
    ort::SessionOptions* options, const ort::ApiBase* base) {
    using namespace streamspec;
    const void* const* table = base->GetApi(ort::kApiVersion);
    // Older than the first with all functions: the graph's operators are then unknown.
    if (table == nullptr) return nullptr;
    static const void* const* const first = api.table = table;
    if (table != first)
        return ort::Api{table}.create_status(ort::kFail,
                                             "streamspec: two ONNX Runtimes in one process");
    return guarded([&] {
        if (chosen_kernels() == nullptr)
            throw Failure{"STREAMSPEC_KERNELS names none of " + std::string(runnable_names())};
        static ort::CustomOpDomain* const domain = make_domain();
        check(api.add_domain(options, domain));
    });
}

// The name of the instruction set in use; "" where STREAMSPEC_KERNELS names none that this
// processor runs.
STREAMSPEC_EXPORT const char* streamspec_kernels() {
    const streamspec::Kernels* const kernels = streamspec::chosen_kernels();
    return kernels ? kernels->name : "";
}

// Names of those that this processor runs, the best first.
STREAMSPEC_EXPORT const char* streamspec_runnable_kernels() { return streamspec::runnable_names(); }
