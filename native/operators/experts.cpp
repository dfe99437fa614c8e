// ExpertsInt8, ExpertsInt6, ExpertsInt4 and ExpertsBlocks: rows times the weights of the experts
// that each of them chose. Weights of others are not read.
#include <algorithm>
#include <cstring>
#include <vector>

#include "operators/custom_op.h"
#include "operators/linear_map.h"

namespace streamspec {
namespace {

// The rows of a call by expert: `order` are the choices, expert by expert, `place` where each of
// them lies there.
struct Grouped {
    struct Group {
        size_t expert, from, count;
    };
    std::vector<Group> groups;
    std::vector<size_t> order, place;

    Grouped(const char* op, const Tensor& chosen, size_t experts)
        : order(chosen.count()), place(chosen.count()) {
        const int64_t* ids = chosen.as<int64_t>();
        std::vector<size_t> next(experts + 1, 0);
        for (size_t i = 0; i < place.size(); i++) {
            if (ids[i] < 0 || ids[i] >= static_cast<int64_t>(experts))
                fail(op, "expert " + std::to_string(ids[i]), "0 to " + std::to_string(experts - 1));
            next[static_cast<size_t>(ids[i]) + 1]++;
        }
        for (size_t expert = 0; expert < experts; expert++) {
            if (next[expert + 1]) groups.push_back({expert, next[expert], next[expert + 1]});
            next[expert + 1] += next[expert];
        }
        for (size_t i = 0; i < place.size(); i++) {
            place[i] = next[static_cast<size_t>(ids[i])]++;
            order[place[i]] = i;
        }
    }
};

template <int Bits>
class ExpertsKernel : LinearMap {
  public:
    static constexpr const char* kName = Bits == 8   ? "ExpertsInt8"
                                         : Bits == 6 ? "ExpertsInt6"
                                         : Bits == 4 ? "ExpertsInt4"
                                                     : "ExpertsBlocks";
    explicit ExpertsKernel(const ort::KernelInfo* info) : LinearMap(kName, info, Bits, 3, true) {}

    void compute(const Call& call) const {
        refuse_computed(kName, call);
        const Tensor x = call.input(0), chosen = call.input(1), shares = call.input(2);
        if (chosen.type != ort::kInt64 || chosen.dims.empty() || chosen.dims.size() == kMaxDims ||
            chosen.dim(1) == 0)
            fail(kName, "chosen experts " + to_text(chosen),
                 "int64 [.., 1 or more], of 7 dimensions at most");
        Dims of_rows = chosen.dims, of_choices = chosen.dims;
        of_rows.set_back(map().in_features);
        of_choices.push_back(map().in_features);
        const bool each = x.dims == of_choices;  // a row for each choice
        if (!each) expect(kName, "rows", x, ort::kFloat, of_rows);
        if (x.type != ort::kFloat) fail(kName, "rows " + to_text(x), "float32");
        if (shares.exists()) expect(kName, "shares", shares, ort::kFloat, chosen.dims);
        Dims dims = shares.exists() ? of_rows : of_choices;
        dims.set_back(map().width());
        float* y = call.output<float>(0, dims);
        const size_t active = chosen.dim(1), choices = chosen.count(), width = map().width();
        if (choices == 0) return;

        const Grouped grouped(kName, chosen, maps());
        const size_t in = map().in_features;
        float* gathered = scratch<Scratch::kGroupedRows>(choices * (in + width));
        float* products = gathered + choices * in;
        for (size_t i = 0; i < choices; i++) {
            const size_t choice = grouped.order[i];
            std::memcpy(gathered + i * in, x.floats() + (each ? choice : choice / active) * in,
                        in * sizeof(float));
        }
        multiply(call, grouped, gathered, choices, products);
        call.parallel_rows(choices / active, [&](size_t from, size_t to) {
            for (size_t row = from; row < to; row++) {
                const size_t* place = grouped.place.data() + row * active;
                if (shares.exists())
                    add_up(products, place, shares.floats() + row * active, active,
                           y + row * width);
                else
                    for (size_t j = 0; j < active; j++)
                        std::memcpy(y + (row * active + j) * width, products + place[j] * width,
                                    width * sizeof(float));
            }
        });
    }

  private:
    // The sum of a row's products, each times its share, in the order of its choices.
    void add_up(const float* products, const size_t* place, const float* shares, size_t active,
                float* y) const {
        const size_t width = map().width();
        for (size_t j = 0; j < active; j++) {
            const float* product = products + place[j] * width;
            const float share = shares[j];
            if (j == 0)
                for (size_t i = 0; i < width; i++) y[i] = share * product[i];
            else
                for (size_t i = 0; i < width; i++) y[i] += share * product[i];
        }
    }

    void multiply(const Call& call, const Grouped& grouped, const float* x, size_t choices,
                  float* y) const {
        const size_t groups = grouped.groups.size(), in = map().in_features;
        const size_t stride = round_up(in, kRowAlign);
        const size_t blocks = map().block_size ? in / map().block_size : 1;
        const size_t codes = stride / sizeof(float) * choices;
        const size_t numbers = round_up(choices * blocks, kLanes);
        float* memory = scratch<Scratch::kQuantizedRows>(codes + 3 * numbers);
        const auto rows_of = [&](const Grouped::Group& group) {
            Rows out{};
            out.rows = group.count;
            out.stride = stride;
            out.blocks = blocks;
            out.codes = reinterpret_cast<int8_t*>(memory) + group.from * stride;
            out.scales = memory + codes + group.from * blocks;
            out.sums4 = out.scales + numbers;
            out.sums8 = reinterpret_cast<int32_t*>(out.sums4 + numbers);
            return out;
        };
        constexpr size_t kFewRows = 32, kChunks = 8;
        const size_t chunks = choices <= kFewRows ? 1 : std::min(groups, kChunks);
        call.parallel(chunks, [&](size_t chunk) {
            float* row = scratch<Scratch::kTask>(stride);
            for (size_t i = groups * chunk / chunks; i < groups * (chunk + 1) / chunks; i++) {
                const Grouped::Group& group = grouped.groups[i];
                kernels().quantize(map(), x + group.from * in, 0, group.count, rows_of(group), row);
            }
        });
        constexpr size_t kPieces = 16;  // of a call, at least, for threads to share
        const size_t pieces = std::min(map().tiles, (kPieces + groups - 1) / groups);
        call.parallel(groups * pieces, [&](size_t task) {
            const Grouped::Group& group = grouped.groups[task / pieces];
            const Linear own = map(group.expert);
            const size_t piece = task % pieces;
            kernels().linear(own, rows_of(group), own.tiles * piece / pieces,
                             own.tiles * (piece + 1) / pieces, y + group.from * own.width());
        });
    }
};

}  // namespace

std::vector<const ort::CustomOp*> experts_operators() {
    using ort::kFloat, ort::kFloat16, ort::kInt64, ort::kInt8, ort::kUint8;
    static const Op<ExpertsKernel<8>> experts8(
        {{kFloat, kInt64, kFloat, kInt8, kFloat, kFloat}, {kFloat}, 2});
    static const Op<ExpertsKernel<6>> experts6(
        {{kFloat, kInt64, kFloat, kUint8, kFloat, kFloat}, {kFloat}, 2});
    static const Op<ExpertsKernel<4>> experts4(
        {{kFloat, kInt64, kFloat, kUint8, kFloat16, kUint8, kFloat}, {kFloat}, 2});
    static const Op<ExpertsKernel<kStored>> experts_blocks(
        {{kFloat, kInt64, kFloat, kUint8, kFloat16, kInt8, kFloat16, kInt8, kInt8, kFloat},
         {kFloat},
         2});
    return {&experts8, &experts6, &experts4, &experts_blocks};
}

}  // namespace streamspec
