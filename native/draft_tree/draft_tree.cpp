// Searches the likeliest draft tree and compares drafts with the tokens that came: what
// runtime/decoding/draft_tree_search.py says, number for number, in a tenth of the memory that
// Python touches. A property test compares the two; where this library is missing, that code runs.
#include <algorithm>

#include "draft_tree/tree_search.h"
#include "operators/ort_api.h"

namespace streamspec {
namespace {

constexpr int64_t kMaxRows = 64;  // of a draft

// The derivative of the log-probability of the tokens that `came`, by the sharpness. A token that
// was not among the candidates counts as the least of them and ends the sum.
double gradient(const Proposal& proposal, const int64_t* came, int64_t count, double sharpness) {
    Scored row;
    double total = 0;
    int64_t parent = 0;
    for (int64_t depth = 0; depth < count; ++depth) {
        if (!row.read(proposal, depth, proposal.conditional() ? parent : kNone, sharpness)) break;
        double mean = 0;
        for (size_t i = 0; i < row.logits.size(); ++i) mean += row.weights[i] * row.logits[i];
        total -= mean * row.share;
        const int64_t* const end = row.tokens + proposal.width();
        const int64_t* const found = std::find(row.tokens, end, came[depth]);
        if (found == end) {
            total += *std::min_element(row.logits.begin(), row.logits.end());
            break;
        }
        const int64_t at = found - row.tokens;
        total += row.logits[static_cast<size_t>(at)];
        parent = row.first + at;
    }
    return total;
}

}  // namespace
}  // namespace streamspec

// The draft tree of at most `rows` nodes; `costs` [rows] or null. `other_...`: a CandidateTree of
// `others` nodes. Returns how many nodes were taken, 64 at most, and writes `places` int64
// [1 + 4 * 64]: how many of them the draft has, then token, parent, rank and sources of each; and
// `numbers` double [1 + 64]: tokens that the draft brings, then the nodes' probabilities.
STREAMSPEC_EXPORT int streamspec_draft_tree(const int64_t* tokens, const float* logits,
                                            const void* more, const int64_t* shape,
                                            const int64_t* other_tokens,
                                            const int64_t* other_parents, const double* other_rates,
                                            const int64_t* other_sources, int64_t others,
                                            int64_t root, double sharpness, int64_t rows,
                                            const double* costs, int64_t* places, double* numbers) {
    using namespace streamspec;
    TreeSearch search({tokens, logits, more, shape},
                      {other_tokens, other_parents, other_rates, other_sources, others}, sharpness);
    const auto max_rows = static_cast<size_t>(std::min(rows, kMaxRows));
    places[0] = static_cast<int64_t>(search.take(root, max_rows, costs, numbers[0]));
    for (size_t i = 0; i < search.taken.size(); ++i) {
        const Node& node = search.taken[i];
        places[1 + 4 * i] = node.token;
        places[2 + 4 * i] = node.parent;
        places[3 + 4 * i] = node.rank;
        places[4 + 4 * i] = i ? search.sources(node) : 0;
        numbers[1 + i] = node.probability;
    }
    return static_cast<int>(search.taken.size());
}

// Compares with the `came` tokens: returns the derivative of their log-probability by the
// sharpness, and writes into `firsts` [count] the likeliest candidate for each of them, kNone where
// there is none. `count`: at most the depths.
STREAMSPEC_EXPORT double streamspec_draft_compare(const int64_t* tokens, const float* logits,
                                                  const void* more, const int64_t* shape,
                                                  const int64_t* came, int64_t count,
                                                  double sharpness, int64_t* firsts) {
    using namespace streamspec;
    const Proposal proposal{tokens, logits, more, shape};
    Scored row;
    int64_t parent = 0;
    for (int64_t depth = 0; depth < count; ++depth) {
        firsts[depth] = kNone;
        if (!row.read(proposal, depth, proposal.conditional() ? parent : kNone, sharpness))
            continue;
        const auto likeliest = std::max_element(row.logits.begin(), row.logits.end());
        firsts[depth] = row.tokens[likeliest - row.logits.begin()];
        const int64_t at = row.likeliest(came[depth]);
        parent = at == kNone ? kNone : row.first + at;
    }
    return gradient(proposal, came, count, sharpness);
}
