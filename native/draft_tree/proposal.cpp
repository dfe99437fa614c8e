#include "draft_tree/proposal.h"

#include <cmath>

namespace streamspec {
namespace {

// The row after candidate `parent` within its level of a draft layer; kNone where none follows it.
int64_t row_after(const Proposal& proposal, int64_t start, int64_t depth, int64_t parent) {
    if (depth == 0) return parent == 0 ? 0 : kNone;
    if (parent == kNone) return kNone;
    const int64_t* const origins = static_cast<const int64_t*>(proposal.more) + start;
    int64_t row = kNone;
    for (int64_t i = 0; i < proposal.levels()[depth]; ++i)
        if (origins[i] == parent) row = i;
    return row;
}

}  // namespace

bool Scored::read(const Proposal& proposal, int64_t depth, int64_t parent, double sharpness) {
    if (depth >= proposal.depths()) return false;
    const int64_t width = proposal.width();
    int64_t row = depth;
    const float* added = nullptr;  // to the logits
    first = 0;
    if (proposal.layered()) {
        int64_t start = 0;
        for (int64_t d = 0; d < depth; ++d) start += proposal.levels()[d];
        const int64_t of_level = row_after(proposal, start, depth, parent);
        if (of_level == kNone) return false;
        row = start + of_level;
        first = of_level * width;
    } else if (proposal.conditional() && parent != kNone) {
        added = static_cast<const float*>(proposal.more) + (depth * width + parent) * width;
    }
    tokens = proposal.tokens + row * width;
    logits.resize(static_cast<size_t>(width));
    weights.resize(static_cast<size_t>(width));
    const float* const raw = proposal.logits + row * width;
    for (size_t i = 0; i < logits.size(); ++i) logits[i] = added ? raw[i] + added[i] : raw[i];
    double largest = logits[0];
    for (const double logit : logits)
        if (logit > largest) largest = logit;
    double sum = 0;
    for (size_t i = 0; i < logits.size(); ++i)
        sum += weights[i] = std::exp(sharpness * (logits[i] - largest));
    share = 1 / sum;
    return true;
}

int64_t Scored::likeliest(int64_t token) const {
    int64_t best = kNone;
    for (size_t i = 0; i < logits.size(); ++i)
        if (tokens[i] == token && (best == kNone || logits[i] > logits[static_cast<size_t>(best)]))
            best = static_cast<int64_t>(i);
    return best;
}

}  // namespace streamspec
