// Token recycling: the table of runtime/draft_sources/recycling.py, number for number, in a tenth
// of the memory that Python touches. A property test compares the two; where this library is
// missing, that code runs. Its constants are explained there.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <tuple>
#include <vector>

#include "operators/ort_api.h"

namespace streamspec {
namespace {

constexpr int64_t kRows = 1 << 16, kChoices = 3, kOffered = 4, kAdded = 12, kDepth = 16;
constexpr int64_t kRivalled = 2 * kOffered, kNoClaim = -1, kDrafter = 1;
constexpr double kMinProbability = 0.05;

int64_t pair(int64_t before, int64_t token) { return (before * 40503 + token) % kRows * kChoices; }
int64_t single(int64_t token) { return token % kRows * kChoices; }

// Puts a choice first in a row.
void keep(int32_t* row, int32_t choice) {
    if (row[0] == choice) return;
    const int32_t newest = row[0], second = row[1];
    row[0] = choice;
    row[1] = newest;
    if (second != choice) row[2] = second;
}

struct Stem {
    int64_t token, parent, before, depth;
    int64_t sources;    // that propose it
    int64_t following;  // sources that propose what follows it
    int64_t level;
    double probability;
};

// -probability, age, token, parent, level: as Python orders them.
using Offer = std::tuple<double, int64_t, int64_t, int64_t, int64_t>;

class Graft {
  public:
    Graft(const int32_t* pairs, const int32_t* singles, const double* alone, int64_t limit)
        : pairs_(pairs),
          singles_(singles),
          alone_(alone),
          deepest_(std::min(limit, kDepth)),
          least_(kMinProbability / *std::max_element(alone, alone + 2 * kRivalled)) {}

    void add_stem(int64_t token, int64_t parent, int64_t before, int64_t sources,
                  double probability) {
        const bool root = nodes.empty();
        nodes.push_back({token, parent, before, 0, sources, 0, kNoClaim, probability});
        if (root) return;
        Stem& above = nodes[static_cast<size_t>(parent)];
        nodes.back().before = above.token;
        nodes.back().depth = above.depth + 1;
        above.following |= sources;
    }

    // Adds what may follow; false where that is nothing.
    bool grow() {
        const size_t stems = stems_ = nodes.size();
        for (size_t node = 0; node < stems; ++node) expand(node);
        while (!offers_.empty() && nodes.size() < stems + kAdded) {
            std::pop_heap(offers_.begin(), offers_.end(), std::greater<>());
            const auto [likely, age, token, parent, level] = offers_.back();
            offers_.pop_back();
            const Stem& above = nodes[static_cast<size_t>(parent)];
            nodes.push_back({token, parent, above.token, above.depth + 1, 0, 0, level, -likely});
            expand(nodes.size() - 1);
        }
        return claimed_ || nodes.size() > stems;
    }

    std::vector<Stem> nodes;

  private:
    // What was chosen after the two last tokens, then what else after the last, into `found`.
    // Returns how many; `level`: of the first.
    int64_t candidates(const Stem& node, int64_t* found, int64_t& level) const {
        int64_t count = 0;
        const auto add = [&](const int32_t* row) {
            for (int64_t i = 0; i < kChoices; ++i)
                if (row[i] && std::find(found, found + count, row[i] - 1) == found + count)
                    found[count++] = row[i] - 1;
        };
        add(pairs_ + pair(node.before, node.token));
        level = count ? 0 : kOffered;
        add(singles_ + single(node.token));
        return std::min(count, kOffered);
    }

    size_t child(size_t parent, int64_t token) const {
        for (size_t node = stems_ - 1; node > 0; --node)
            if (nodes[node].parent == static_cast<int64_t>(parent) && nodes[node].token == token)
                return node;
        return 0;
    }

    // Offers what may follow a node; claims the tokens of it that the drafter proposes.
    void expand(size_t at) {
        const Stem node = nodes[at];
        if (node.depth >= deepest_ || (node.probability < least_ && !node.following)) return;
        int64_t found[2 * kChoices], level = 0;
        const int64_t count = candidates(node, found, level);
        if (node.following & ~kDrafter) level += kRivalled;
        for (int64_t i = 0; i < count; ++i, ++level) {
            const size_t known = node.following ? child(at, found[i]) : 0;
            if (known && !(nodes[known].sources & ~kDrafter)) {
                nodes[known].level = level;
                claimed_ = true;
            } else if (!known && !(node.following & kDrafter)) {
                const double likely = node.probability * alone_[level];
                if (likely >= kMinProbability || at == 0) offer(likely, found[i], at, level);
            }
        }
    }

    void offer(double likely, int64_t token, size_t parent, int64_t level) {
        offers_.emplace_back(-likely, static_cast<int64_t>(offers_.size()), token,
                             static_cast<int64_t>(parent), level);
        std::push_heap(offers_.begin(), offers_.end(), std::greater<>());
    }

    const int32_t* const pairs_;
    const int32_t* const singles_;
    const double* const alone_;
    const int64_t deepest_;
    const double least_;
    size_t stems_ = 0;
    bool claimed_ = false;
    std::vector<Offer> offers_;
};

}  // namespace
}  // namespace streamspec

// What may follow the `stems`, int64 token, parent and sources of each, and their `probabilities`;
// `before`: the token before the first. `alone` double [16]: rates of the levels. Returns how many
// nodes the stems and what follows them have beyond the first, 0 for nothing, and writes `found`
// int64 [3 * (63 + 12)]: token, parent - 1 and level of each.
STREAMSPEC_EXPORT int64_t streamspec_recycled(const int32_t* pairs, const int32_t* singles,
                                              int64_t before, int64_t limit, const int64_t* stems,
                                              const double* probabilities, int64_t count,
                                              const double* alone, int64_t* found) {
    using namespace streamspec;
    Graft graft(pairs, singles, alone, limit);
    for (int64_t i = 0; i < count; ++i)
        graft.add_stem(stems[i], stems[count + i], before, stems[2 * count + i], probabilities[i]);
    if (!graft.grow()) return 0;
    const size_t nodes = graft.nodes.size() - 1;
    for (size_t i = 0; i < nodes; ++i) {
        const Stem& node = graft.nodes[i + 1];
        found[i] = node.token;
        found[nodes + i] = node.parent - 1;
        found[2 * nodes + i] = node.level;
    }
    return static_cast<int64_t>(nodes);
}

// Keeps what the model chose after each row of a draft: `rows` int64 [3, count], token, parent and
// choice of each (-1: it was pruned); `path` [accepted], rising: the rows accepted, which are the
// newest.
STREAMSPEC_EXPORT void streamspec_recycle(int32_t* pairs, int32_t* singles, int64_t before,
                                          const int64_t* rows, int64_t count, const int64_t* path,
                                          int64_t accepted) {
    using namespace streamspec;
    for (const bool taken : {false, true})
        for (int64_t node = 0; node < count; ++node) {
            const int64_t choice = rows[2 * count + node];
            if (choice < 0 || std::binary_search(path, path + accepted, node) != taken) continue;
            const int64_t after = node ? rows[rows[count + node]] : before;
            keep(pairs + pair(after, rows[node]), static_cast<int32_t>(choice + 1));
            keep(singles + single(rows[node]), static_cast<int32_t>(choice + 1));
        }
}
