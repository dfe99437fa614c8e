// The likeliest draft tree: the search of runtime/decoding/draft_tree_search.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "draft_tree/proposal.h"

namespace streamspec {

constexpr int64_t kOff = -1, kRoot = 0;  // of `Node::at`
enum Agreement : int64_t { kAlone = 0, kAgrees = 1, kDiffers = 2, kAgreements = 3 };

// What other sources propose, as a tree: `tokens`, `parents` (-1: the root), `sources` [size], and
// `rates` [size, kAgreements], with which each comes by its `Agreement` with the drafter.
struct CandidateTree {
    const int64_t* tokens;
    const int64_t* parents;
    const double* rates;
    const int64_t* sources;
    int64_t size;
};

// `parent`: its index among the nodes taken; `number`: of its candidate, kNone if none; `rank`:
// among the candidates after its parent; `at`: where it stands in the candidate tree: kOff, kRoot,
// or 1 + its index there.
struct Node {
    double probability;
    int64_t parent, depth, token, number, rank, at;
};

class TreeSearch {
  public:
    TreeSearch(const Proposal& proposal, const CandidateTree& others, double sharpness);

    // Takes at most `rows` nodes by falling probability, the root first. Returns how many of
    // `taken` the draft has; `expected`: the tokens that they bring. `costs` [rows] or null.
    size_t take(int64_t root, size_t rows, const double* costs, double& expected);

    // Bits of the sources that propose a node taken.
    int64_t sources(const Node& node) const;

    std::vector<Node> taken;

  private:
    struct Candidate {
        int64_t token;
        double probability;
        int64_t number;
    };

    struct Offer {
        Node node;
        int64_t age;
        // Heaps have the largest first: the likeliest, then the oldest.
        bool operator<(const Offer& other) const {
            return node.probability != other.node.probability
                       ? node.probability < other.node.probability
                       : age > other.age;
        }
    };

    // What may follow a node taken: candidates [begin, begin + count) of the pool, likeliest first,
    // what others claim, [claims, claims_end), and the factor that this leaves to the candidates.
    struct Children {
        int64_t depth, parent;
        size_t begin, count, claims, claims_end;
        double factor;
    };

    // A token of the candidate tree. `own`: the probability that the drafter gives it; `claimed`:
    // whether a source says how likely it is.
    struct Claim {
        int64_t token, number, rank, at;
        double own, probability;
        bool claimed;
    };

    void take_node(const Node& node);
    // Reads what the others propose after `node`, and pushes what of it may come.
    void push_claims(const Node& node, Children& children);
    Claim claim(const Children& children, int64_t at, int64_t& unknown) const;
    // Offers candidate `rank` after a node taken, or the next one that is not claimed.
    void offer(int64_t parent, int64_t rank);
    bool is_claimed(const Children& children, int64_t rank) const;
    void push(const Node& node);
    Children candidates(const Node& node);
    void append_candidates();

    const Proposal proposal_;
    const CandidateTree others_;
    const double sharpness_;
    std::vector<int64_t> first_child_, next_sibling_;  // by `Node::at`; kRoot: no more
    std::vector<Claim> claims_;
    Scored row_;
    std::vector<double> order_;  // logits of the candidates that are being sorted
    std::vector<Candidate> pool_;
    std::vector<Children> children_;
    std::vector<Offer> heap_;
    int64_t age_ = 0;
};

}  // namespace streamspec
