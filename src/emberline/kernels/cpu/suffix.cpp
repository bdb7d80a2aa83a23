#include "suffix.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace ember {
namespace {

constexpr int kGram = 2;               // tokens that must match
constexpr int kMaxMatch = 32;          // tokens that are compared
constexpr int kMaxCandidates = 64;     // newest places that are compared
constexpr float kMinProbability = 0.05f;  // of all guessed tokens together

// One place in a text where the newest tokens occurred, and which token it continues with.
struct Candidate {
    const std::vector<int32_t>* text;
    long next;     // position of the next token
    long period;   // distance to the end of the text; a copy that reaches the end goes on with what it copied. 0: it stops there
    float weight;  // number of tokens that matched
};

class SuffixIndex {
public:
    explicit SuffixIndex(long capacity) : capacity_(capacity), newest_(1024, -1) {}

    void append(const int32_t* tokens, long count) {
        for (long i = 0; i < count; i++) {
            tokens_.push_back(tokens[i]);
            older_.push_back(-1);
            if (size() * 2 > static_cast<long>(newest_.size()))
                rebuild(newest_.size() * 4);
            else
                link(size() - 1);
        }
        if (capacity_ && size() > capacity_) {
            tokens_.erase(tokens_.begin(), tokens_.begin() + size() / 2);
            rebuild(newest_.size());
        }
    }

    long size() const { return static_cast<long>(tokens_.size()); }
    const std::vector<int32_t>& tokens() const { return tokens_; }

    // Adds the places in this text where `tail` occurs, newest first. `is_own`: the tail is the end of this text.
    void find(const std::vector<int32_t>& tail, bool is_own, std::vector<Candidate>& found) const {
        if (static_cast<long>(tail.size()) < kGram) return;
        long at = newest_[bucket(tail.data() + tail.size())];
        for (int seen = 0; at >= 0 && seen < kMaxCandidates; at = older_[at], seen++) {
            int length = match_length(tail, at);
            if (length >= kGram) found.push_back({&tokens_, at, is_own ? size() - at : 0, static_cast<float>(length)});
        }
    }

private:
    // `end` points behind the last of kGram tokens.
    size_t bucket(const int32_t* end) const {
        uint64_t hash = 0;
        for (int i = 1; i <= kGram; i++) hash = (hash ^ static_cast<uint32_t>(end[-i])) * 0x9E3779B97F4A7C15ull;
        return hash >> 20 & (newest_.size() - 1);
    }

    // Makes a place, which is the position of a token, findable by the tokens before it.
    void link(long place) {
        if (place < kGram) return;
        for (int i = 1; i <= kGram; i++)
            if (tokens_[place - i] < 0) return;
        size_t at = bucket(tokens_.data() + place);
        older_[place] = newest_[at];
        newest_[at] = static_cast<int32_t>(place);
    }

    void rebuild(size_t buckets) {
        newest_.assign(buckets, -1);
        older_.assign(tokens_.size(), -1);
        for (long place = 0; place < size(); place++) link(place);
    }

    int match_length(const std::vector<int32_t>& tail, long place) const {
        long most = std::min<long>({kMaxMatch, place, static_cast<long>(tail.size())});
        const int32_t *ours = tokens_.data() + place - 1, *theirs = tail.data() + tail.size() - 1;
        int length = 0;
        while (length < most && ours[-length] == theirs[-length] && ours[-length] >= 0) length++;
        return length;
    }

    long capacity_;
    std::vector<int32_t> tokens_;
    std::vector<int32_t> older_;   // by place: the next older one in the same bucket, or -1
    std::vector<int32_t> newest_;  // by bucket: the newest place, or -1
};

// Keeps the candidates that match at least half as many tokens as the best one: shorter matches say little beside it.
void drop_short_matches(std::vector<Candidate>& candidates) {
    float best = 0;
    for (const auto& one : candidates) best = std::max(best, one.weight);
    std::erase_if(candidates, [&](const Candidate& one) { return one.weight * 2 < best; });
}

// Returns the token at the candidate's next place plus `offset`, or -1 at the end of its text.
int32_t token_at(const Candidate& candidate, long offset) {
    const auto& text = *candidate.text;
    long at = candidate.next + offset;
    if (at < static_cast<long>(text.size())) return text[at];
    return candidate.period ? text[candidate.next + offset % candidate.period] : -1;
}

// Returns the token that most candidates, by weight, continue with, and its share of their weight; -1: none continues.
std::pair<int32_t, float> vote(const std::vector<Candidate>& candidates, long offset) {
    std::vector<std::pair<int32_t, float>> weights;  // of each token; there are few different ones
    float total = 0;
    for (const auto& one : candidates) {
        int32_t token = token_at(one, offset);
        total += one.weight;
        if (token < 0) continue;
        auto at = std::find_if(weights.begin(), weights.end(), [&](const auto& each) { return each.first == token; });
        if (at == weights.end()) weights.emplace_back(token, one.weight);
        else at->second += one.weight;
    }
    std::pair<int32_t, float> best{-1, 0.0f};
    for (const auto& each : weights)
        if (each.second > best.second) best = each;
    return {best.first, total > 0 ? best.second / total : 0.0f};
}

}  // namespace
}  // namespace ember

using ember::SuffixIndex;

extern "C" {

void* ember_suffix_new(long capacity) { return new SuffixIndex(capacity); }

void ember_suffix_free(void* index) { delete static_cast<SuffixIndex*>(index); }

void ember_suffix_append(void* index, const int32_t* tokens, long count) {
    static_cast<SuffixIndex*>(index)->append(tokens, count);
}

long ember_suffix_propose(const void* own, const void* shared, long limit, int32_t* tokens, float* confidence) {
    const auto& text = *static_cast<const SuffixIndex*>(own);
    std::vector<ember::Candidate> candidates;
    text.find(text.tokens(), true, candidates);
    if (shared) static_cast<const SuffixIndex*>(shared)->find(text.tokens(), false, candidates);
    ember::drop_short_matches(candidates);
    float probability = 1;
    for (long count = 0; count < limit; count++) {
        auto [best, share] = ember::vote(candidates, count);
        if (best < 0) return count;
        std::erase_if(candidates, [&, best = best](const auto& one) { return ember::token_at(one, count) != best; });
        float longest = 0;
        for (const auto& one : candidates) longest = std::max(longest, one.weight);
        float matched = longest + static_cast<float>(count);
        confidence[count] = share * matched / (matched + 2);
        probability *= confidence[count];
        if (probability < ember::kMinProbability) return count;
        tokens[count] = best;
    }
    return limit;
}
}
