// Searches the likeliest draft tree and compares drafts with the tokens that came: what
// runtime/decoding/draft_tree_search.py says, number for number, in a tenth of the memory that
// Python touches. A property test compares the two; where this library is missing, that code runs.
#include <algorithm>
#include <cmath>
#include <vector>

#include "operators/ort_api.h"

namespace streamspec {
namespace {

constexpr int64_t kNone = -1;    // no candidate, or not in the tree of other sources
constexpr int kMaxRows = 64;     // of a draft
constexpr int64_t kDrafter = 1;  // its bit among the sources of a node
enum Kind : int64_t { kAlone = 0, kAgrees = 1, kDiffers = 2, kKinds = 3 };

// The candidates of a drafter. `shape`: depths, candidates of a row, whether they are of a draft
// layer, and then the rows of each depth; `more`: float [depths, candidates, candidates], what the
// candidate before adds, or int64 [rows], the candidate that a row follows, or nothing.
struct Proposal {
    const int64_t* tokens;
    const float* logits;
    const void* more;
    const int64_t* shape;

    int64_t depths() const { return tokens ? shape[0] : 0; }
    int64_t width() const { return shape[1]; }
    bool layered() const { return shape[2] != 0; }
    // Candidates depend on the one before them.
    bool conditional() const { return more != nullptr; }
};

struct Candidate {
    int64_t token;
    double probability;
    int64_t number;
};

// A row of candidates: a probability is its weight's share.
struct Row {
    const int64_t* tokens = nullptr;
    int64_t first = 0;
    std::vector<double> logits, weights;
    double share = 0;

    // Of what follows candidate `parent` of the depth before; false where nothing does.
    bool read(const Proposal& from, int64_t depth, int64_t parent, double sharpness) {
        if (depth >= from.depths()) return false;
        const int64_t width = from.width();
        int64_t row = depth;
        first = 0;
        if (from.layered()) {
            const int64_t* const levels = from.shape + 3;
            int64_t start = 0, at = depth ? kNone : (parent == 0 ? 0 : kNone);
            for (int64_t d = 0; d < depth; ++d) start += levels[d];
            if (depth && parent != kNone)
                for (int64_t i = 0; i < levels[depth]; ++i)
                    if (static_cast<const int64_t*>(from.more)[start + i] == parent) at = i;
            if (at == kNone) return false;
            row = start + at;
            first = at * width;
        }
        tokens = from.tokens + row * width;
        logits.resize(width);
        weights.resize(width);
        const float* const own = from.logits + row * width;
        const float* const pair =
            from.layered() || !from.conditional() || parent == kNone
                ? nullptr
                : static_cast<const float*>(from.more) + (depth * width + parent) * width;
        for (int64_t i = 0; i < width; ++i) logits[i] = pair ? own[i] + pair[i] : own[i];
        double largest = logits[0];
        for (int64_t i = 1; i < width; ++i)
            if (logits[i] > largest) largest = logits[i];
        double sum = 0;
        for (int64_t i = 0; i < width; ++i)
            sum += weights[i] = std::exp(sharpness * (logits[i] - largest));
        share = 1 / sum;
        return true;
    }

    // The place of `token`, the likeliest where there are several; kNone where it is no candidate.
    int64_t likeliest(int64_t token) const {
        int64_t best = kNone;
        for (int64_t i = 0; i < static_cast<int64_t>(logits.size()); ++i)
            if (tokens[i] == token && (best == kNone || logits[i] > logits[best])) best = i;
        return best;
    }
};

// What other sources propose, as a tree: `tokens`, `parents` (kNone: the root), `sources` [size],
// and `rates` [size, kKinds], with which each comes by its `Kind`.
struct Others {
    const int64_t* tokens;
    const int64_t* parents;
    const double* rates;
    const int64_t* sources;
    int64_t size;
};

// `at`: 1 + where it stands among the others, 0 for the root, kNone for none.
struct Node {
    double probability;
    int64_t parent, depth, token, number, rank, at;
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

// What may follow a node taken: candidates [begin, begin + count) of the pool, likeliest first, the
// ranks that others have claimed, [claims, claims_end) of theirs, and the factor that this leaves
// to the candidates.
struct Children {
    int64_t depth, parent;
    size_t begin, count, claims, claims_end;
    double factor;
};

// A token of the others; `own`: the probability that the drafter gives it; `claimed`: whether a
// source says how likely it is.
struct Claim {
    int64_t token, number, rank, at;
    double own, probability;
    bool claimed;
};

class Search {
  public:
    Search(const Proposal& proposal, const Others& others, double sharpness)
        : proposal_(proposal),
          others_(others),
          sharpness_(sharpness),
          first_(others.size + 1, 0),
          next_(others.size + 1, 0) {
        for (int64_t at = others.size; at > 0; --at) {
            const int64_t parent = others.parents[at - 1] + 1;
            next_[at] = first_[parent];
            first_[parent] = at;
        }
    }

    // Takes nodes by falling probability; returns how many of `taken` the draft has.
    size_t take(int64_t root, size_t rows, const double* costs, double& brings) {
        accept({1.0, 0, 0, root, 0, 0, 0});
        double expected = 1, best = 0;
        size_t size = 1;
        brings = 1;
        while (!heap_.empty() && taken.size() < rows) {
            std::pop_heap(heap_.begin(), heap_.end());
            const Node node = heap_.back().node;
            heap_.pop_back();
            expected += node.probability;
            const size_t here = taken.size();
            if (!costs || expected / costs[here] > best || size == 1) {
                size = here + 1;
                brings = expected;
                best = costs ? expected / costs[here] : 0;
            }
            if (costs) {
                bool more = false;
                for (size_t n = 1; n < rows - here && !more; ++n)
                    more = expected + node.probability * n > best * costs[here + n];
                if (!more) {  // no further nodes could pay
                    taken.push_back(node);
                    break;
                }
            }
            accept(node);
            if (node.at == kNone) offer(node.parent, node.rank + 1);
        }
        return size;
    }

    // Bits of the sources that propose a node taken.
    int64_t sources(const Node& node) const {
        return (node.number != kNone ? kDrafter : 0) |
               (node.at > 0 ? others_.sources[node.at - 1] : 0);
    }

    std::vector<Node> taken;

  private:
    void accept(const Node& node) {
        const int64_t index = static_cast<int64_t>(taken.size());
        Children next = candidates(node);
        taken.push_back(node);
        double claimed = 0, own = 0;
        next.claims = next.claims_end = claims_.size();
        if (node.at != kNone) {
            int64_t unknown = static_cast<int64_t>(next.count);
            for (int64_t at = first_[node.at]; at; at = next_[at]) {
                claims_.push_back(claim(next, at, unknown));
                if (!claims_.back().claimed) continue;
                claimed += claims_.back().probability;
                own += claims_.back().own;
            }
            next.claims_end = claims_.size();
        }
        if (next.claims_end > next.claims) {
            const double scale = claimed > 1 ? 1 / claimed : 1.0;
            if (claimed > 0)
                next.factor = std::max(0.0, 1 - claimed * scale) / std::max(1 - own, 1e-6);
            for (size_t i = next.claims; i < next.claims_end; ++i) {
                const Claim& one = claims_[i];
                const double share =
                    one.claimed ? one.probability * scale : std::min(1.0, one.own * next.factor);
                if (share > 0)
                    push({node.probability * share, index, node.depth + 1, one.token, one.number,
                          one.rank, one.at});
            }
        }
        children_.push_back(next);
        offer(index, 0);
    }

    Claim claim(const Children& among, int64_t at, int64_t& unknown) const {
        const int64_t token = others_.tokens[at - 1];
        const Candidate* const all = pool_.data() + among.begin;
        size_t rank = 0;
        while (rank < among.count && all[rank].token != token) ++rank;
        const bool known = rank < among.count;
        const double own = known ? all[rank].probability : 0;
        const double rate =
            others_.rates[kKinds * (at - 1) + (among.count ? (rank ? kDiffers : kAgrees) : kAlone)];
        return {token,
                known ? all[rank].number : kNone,
                known ? static_cast<int64_t>(rank) : unknown++,
                at,
                own,
                rate > own ? rate : own,
                rate > 0};
    }

    bool claimed(const Children& of, int64_t rank) const {
        for (size_t i = of.claims; i < of.claims_end; ++i)
            if (claims_[i].rank == rank) return true;
        return false;
    }

    void offer(int64_t parent, int64_t rank) {
        const Children& of = children_[parent];
        while (claimed(of, rank)) ++rank;
        if (rank >= static_cast<int64_t>(of.count)) return;
        const Candidate& child = pool_[of.begin + rank];
        const double share = child.probability * of.factor;
        push({taken[parent].probability * (share < 1.0 ? share : 1.0), parent,
              taken[parent].depth + 1, child.token, child.number, rank, kNone});
    }

    void push(const Node& node) {
        heap_.push_back({node, age_++});
        std::push_heap(heap_.begin(), heap_.end());
    }

    Children candidates(const Node& node) {
        const int64_t parent = proposal_.conditional() ? node.number : kNone;
        for (const Children& known : children_)
            if (known.depth == node.depth && known.parent == parent)
                return {node.depth, parent, known.begin, known.count, 0, 0, 1.0};
        const size_t begin = pool_.size();
        if (row_.read(proposal_, node.depth, parent, sharpness_)) {
            for (int64_t i = 0; i < proposal_.width();
                 ++i) {  // by falling logits, equal ones in their order
                size_t at = pool_.size();
                pool_.push_back({row_.tokens[i], row_.weights[i] * row_.share, row_.first + i});
                order_.resize(pool_.size() - begin);
                order_.back() = row_.logits[i];
                for (; at > begin && order_[at - begin - 1] < order_[at - begin]; --at) {
                    std::swap(order_[at - begin - 1], order_[at - begin]);
                    std::swap(pool_[at - 1], pool_[at]);
                }
            }
        }
        return {node.depth, parent, begin, pool_.size() - begin, 0, 0, 1.0};
    }

    const Proposal proposal_;
    const Others others_;
    const double sharpness_;
    std::vector<int64_t> first_, next_;  // of the others after each, and beside it; 0: no more
    std::vector<Claim> claims_;
    Row row_;
    std::vector<double> order_;
    std::vector<Candidate> pool_;
    std::vector<Children> children_;
    std::vector<Offer> heap_;
    int64_t age_ = 0;
};

}  // namespace
}  // namespace streamspec

// The draft tree of at most `rows` nodes; `costs` [rows] or nothing. `other_...`: see Others, of
// `others` nodes. Returns how many nodes were taken, 64 at most, and writes `places` int64 [1 + 4 *
// 64]: how many of them the draft has, then token, parent, rank and sources of each; and `numbers`
// double [1 + 64]: tokens that the draft brings, then the nodes' probabilities.
STREAMSPEC_EXPORT int streamspec_draft_tree(const int64_t* tokens, const float* logits,
                                            const void* more, const int64_t* shape,
                                            const int64_t* other_tokens,
                                            const int64_t* other_parents, const double* other_rates,
                                            const int64_t* other_sources, int64_t others,
                                            int64_t root, double sharpness, int64_t rows,
                                            const double* costs, int64_t* places, double* numbers) {
    using namespace streamspec;
    Search search({tokens, logits, more, shape},
                  {other_tokens, other_parents, other_rates, other_sources, others}, sharpness);
    const size_t size = search.take(root, static_cast<size_t>(std::min<int64_t>(rows, kMaxRows)),
                                    costs, numbers[0]);
    places[0] = static_cast<int64_t>(size);
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
    Row row;
    double total = 0;
    int64_t parent = 0;
    for (int64_t depth = 0; depth < count; ++depth) {
        if (!row.read(proposal, depth, proposal.conditional() ? parent : kNone, sharpness)) break;
        const int64_t width = proposal.width();
        double mean = 0, least = row.logits[0];
        for (int64_t i = 0; i < width; ++i) mean += row.weights[i] * row.logits[i];
        for (int64_t i = 1; i < width; ++i)
            if (row.logits[i] < least) least = row.logits[i];
        total -= mean * row.share;
        const int64_t at = std::find(row.tokens, row.tokens + width, came[depth]) - row.tokens;
        if (at == width) {
            total += least;
            break;
        }
        total += row.logits[at];
        parent = row.first + at;
    }
    parent = 0;
    for (int64_t depth = 0; depth < count; ++depth) {
        firsts[depth] = kNone;
        if (!row.read(proposal, depth, proposal.conditional() ? parent : kNone, sharpness))
            continue;
        firsts[depth] =
            row.tokens[std::max_element(row.logits.begin(), row.logits.end()) - row.logits.begin()];
        const int64_t at = row.likeliest(came[depth]);
        parent = at == kNone ? kNone : row.first + at;
    }
    return total;
}
