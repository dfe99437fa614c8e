#include "draft_tree/tree_search.h"

#include <algorithm>
#include <utility>

namespace streamspec {
namespace {

constexpr int64_t kDrafter = 1;  // its bit among the sources of a node

}  // namespace

TreeSearch::TreeSearch(const Proposal& proposal, const CandidateTree& others, double sharpness)
    : proposal_(proposal),
      others_(others),
      sharpness_(sharpness),
      first_child_(static_cast<size_t>(others.size) + 1, kRoot),
      next_sibling_(static_cast<size_t>(others.size) + 1, kRoot) {
    for (int64_t at = others.size; at > 0; --at) {
        int64_t& first = first_child_[static_cast<size_t>(others.parents[at - 1] + 1)];
        next_sibling_[static_cast<size_t>(at)] = first;
        first = at;
    }
}

size_t TreeSearch::take(int64_t root, size_t rows, const double* costs, double& expected) {
    take_node({1.0, 0, 0, root, 0, 0, kRoot});
    double sum = 1, best = 0;
    size_t size = 1;
    expected = 1;
    while (!heap_.empty() && taken.size() < rows) {
        std::pop_heap(heap_.begin(), heap_.end());
        const Node node = heap_.back().node;
        heap_.pop_back();
        sum += node.probability;
        const size_t here = taken.size();
        if (!costs || sum / costs[here] > best || size == 1) {
            size = here + 1;
            expected = sum;
            best = costs ? sum / costs[here] : 0;
        }
        if (costs) {
            bool more = false;
            for (size_t n = 1; n < rows - here && !more; ++n)
                more = sum + node.probability * static_cast<double>(n) > best * costs[here + n];
            if (!more) {  // no further nodes could pay
                taken.push_back(node);
                break;
            }
        }
        take_node(node);
        if (node.at == kOff) offer(node.parent, node.rank + 1);
    }
    return size;
}

int64_t TreeSearch::sources(const Node& node) const {
    const int64_t drafter = node.number != kNone ? kDrafter : 0;
    return drafter | (node.at > kRoot ? others_.sources[node.at - 1] : 0);
}

void TreeSearch::take_node(const Node& node) {
    Children children = candidates(node);
    children.claims = children.claims_end = claims_.size();
    if (node.at != kOff) push_claims(node, children);
    const auto index = static_cast<int64_t>(taken.size());
    taken.push_back(node);
    children_.push_back(children);
    offer(index, 0);
}

void TreeSearch::push_claims(const Node& node, Children& children) {
    double claimed = 0, own = 0;
    auto unknown = static_cast<int64_t>(children.count);
    for (int64_t at = first_child_[static_cast<size_t>(node.at)]; at != kRoot;
         at = next_sibling_[static_cast<size_t>(at)]) {
        claims_.push_back(claim(children, at, unknown));
        if (!claims_.back().claimed) continue;
        claimed += claims_.back().probability;
        own += claims_.back().own;
    }
    children.claims_end = claims_.size();
    const double scale = claimed > 1 ? 1 / claimed : 1.0;
    if (claimed > 0) children.factor = std::max(0.0, 1 - claimed * scale) / std::max(1 - own, 1e-6);
    const auto index = static_cast<int64_t>(taken.size());  // of `node`, which is being taken
    for (size_t i = children.claims; i < children.claims_end; ++i) {
        const Claim& c = claims_[i];
        const double share =
            c.claimed ? c.probability * scale : std::min(1.0, c.own * children.factor);
        if (share > 0)
            push(
                {node.probability * share, index, node.depth + 1, c.token, c.number, c.rank, c.at});
    }
}

TreeSearch::Claim TreeSearch::claim(const Children& children, int64_t at, int64_t& unknown) const {
    const int64_t token = others_.tokens[at - 1];
    const Candidate* const all = pool_.data() + children.begin;
    size_t rank = 0;
    while (rank < children.count && all[rank].token != token) ++rank;
    const bool known = rank < children.count;
    const double own = known ? all[rank].probability : 0;
    const Agreement agreement = children.count == 0 ? kAlone : rank == 0 ? kAgrees : kDiffers;
    const double rate = others_.rates[kAgreements * (at - 1) + agreement];
    return {token,
            known ? all[rank].number : kNone,
            known ? static_cast<int64_t>(rank) : unknown++,
            at,
            own,
            rate > own ? rate : own,
            rate > 0};
}

void TreeSearch::offer(int64_t parent, int64_t rank) {
    const Children& children = children_[static_cast<size_t>(parent)];
    while (is_claimed(children, rank)) ++rank;
    if (rank >= static_cast<int64_t>(children.count)) return;
    const Candidate& child = pool_[children.begin + static_cast<size_t>(rank)];
    const Node& node = taken[static_cast<size_t>(parent)];
    const double share = std::min(1.0, child.probability * children.factor);
    push({node.probability * share, parent, node.depth + 1, child.token, child.number, rank, kOff});
}

bool TreeSearch::is_claimed(const Children& children, int64_t rank) const {
    for (size_t i = children.claims; i < children.claims_end; ++i)
        if (claims_[i].rank == rank) return true;
    return false;
}

void TreeSearch::push(const Node& node) {
    heap_.push_back({node, age_++});
    std::push_heap(heap_.begin(), heap_.end());
}

TreeSearch::Children TreeSearch::candidates(const Node& node) {
    const int64_t parent = proposal_.conditional() ? node.number : kNone;
    for (const Children& known : children_)
        if (known.depth == node.depth && known.parent == parent)
            return {node.depth, parent, known.begin, known.count, 0, 0, 1.0};
    const size_t begin = pool_.size();
    if (row_.read(proposal_, node.depth, parent, sharpness_)) append_candidates();
    return {node.depth, parent, begin, pool_.size() - begin, 0, 0, 1.0};
}

// Appends the row's candidates to the pool by falling logits, equal ones in their order.
void TreeSearch::append_candidates() {
    const size_t begin = pool_.size();
    order_.clear();
    for (size_t i = 0; i < row_.logits.size(); ++i) {
        pool_.push_back(
            {row_.tokens[i], row_.weights[i] * row_.share, row_.first + static_cast<int64_t>(i)});
        order_.push_back(row_.logits[i]);
        for (size_t at = i; at > 0 && order_[at - 1] < order_[at]; --at) {
            std::swap(order_[at - 1], order_[at]);
            std::swap(pool_[begin + at - 1], pool_[begin + at]);
        }
    }
}

}  // namespace streamspec
