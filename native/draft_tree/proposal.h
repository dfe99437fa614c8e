// The candidates of a drafter for the next tokens: runtime/decoding/draft_proposal.py.
#pragma once

#include <cstdint>
#include <vector>

namespace streamspec {

constexpr int64_t kNone = -1;  // no candidate

// `shape`: depths, candidates of a row, whether they are of a draft layer, and then the rows of
// each depth. `more`: float32 [depths, candidates, candidates], what the candidate before adds; of
// a draft layer int64 [rows], the candidate that a row follows; or null.
struct Proposal {
    const int64_t* tokens;
    const float* logits;
    const void* more;
    const int64_t* shape;

    int64_t depths() const { return tokens ? shape[0] : 0; }
    int64_t width() const { return shape[1]; }
    bool layered() const { return shape[2] != 0; }
    const int64_t* levels() const { return shape + 3; }
    // Candidates depend on the one before them.
    bool conditional() const { return more != nullptr; }
};

// A row of candidates: a probability is its weight's share. `first`: the number of its first.
struct Scored {
    const int64_t* tokens = nullptr;
    int64_t first = 0;
    std::vector<double> logits, weights;
    double share = 0;

    // Reads those for `depth` after candidate `parent` of the depth before; false where there are
    // none.
    bool read(const Proposal& proposal, int64_t depth, int64_t parent, double sharpness);

    // The index of `token`, the likeliest where there are several; kNone where it is no candidate.
    int64_t likeliest(int64_t token) const;
};

}  // namespace streamspec
