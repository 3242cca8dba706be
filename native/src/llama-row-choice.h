// The choice of a token from a row or from some of its tokens, by a request's filters.
#pragma once

#include "llama-row-loops.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

struct row_token {
    uint64_t key;
    uint64_t mass;
    float    logit;
};

// Reorders the tokens. The lowest key of the best ones: `need` tokens, or tokens with masses of at least `need` together.
template <typename Weight>
static uint64_t lowest_kept(std::vector<row_token> & tokens, uint64_t need, Weight weight) {
    auto begin = tokens.begin(), end = tokens.end();
    while (end - begin > 24) {
        const uint64_t a = begin->key, b = begin[(end - begin) / 2].key, c = end[-1].key;
        const uint64_t pivot  = std::max(std::min(a, b), std::min(std::max(a, b), c));
        const auto     middle = std::partition(begin, end, [&](const row_token & t) { return t.key > pivot; });
        uint64_t       above  = 0;
        for (auto it = begin; it != middle; it++) { above += weight(*it); }
        if (above >= need) {
            end = middle;
        } else {
            need -= above;
            begin = middle;
            // the pivot itself comes next, and is taken out so that the rest becomes smaller
            std::iter_swap(begin, std::find_if(begin, end, [&](const row_token & t) { return t.key == pivot; }));
            if (weight(*begin) >= need || end - begin == 1) { return pivot; }
            need -= weight(*begin);
            begin++;
        }
    }
    std::sort(begin, end, [](const row_token & x, const row_token & y) { return x.key > y.key; });
    for (auto it = begin; it != end; it++) {
        if (weight(*it) >= need) { return it->key; }
        need -= weight(*it);
    }
    return 0;
}

// The tokens that are left: those of the row from `low` to `high`, or a list.
class row_choice {
public:
    row_choice(const llama_row_request & request, int32_t n_real, int32_t n_vocab) :
        params(request.params), position(request.position), n_real(n_real), n_vocab(n_vocab) {}

    int32_t surprise = 0; // of token(), with Mirostat

    void whole(const float * logits) {
        row  = logits;
        best = highest(row, n_real);
        low  = LOWEST;
    }

    // -1 if no token is left. One with an infinite logit has all the mass.
    int32_t token() {
        if (best == NONE) { return -1; }
        if (lrs_unusable(best)) { return greedy(); }
        for (int i = 0; i < LLAMA_ROW_MAX_OPS && params.ops[i]; i++) {
            switch (params.ops[i]) {
                case LLAMA_ROW_OP_TOP_N_SIGMA:
                    top_n_sigma();
                    break;
                case LLAMA_ROW_OP_TOP_K:
                    top_k(params.top_k);
                    break;
                case LLAMA_ROW_OP_TEMPERATURE:
                    scale = params.scale;
                    break;
                case LLAMA_ROW_OP_TYPICAL:
                    typical();
                    break;
                case LLAMA_ROW_OP_TOP_P:
                    top_p();
                    break;
                case LLAMA_ROW_OP_MIN_P:
                    min_p();
                    break;
                case LLAMA_ROW_OP_XTC:
                    xtc();
                    break;
                case LLAMA_ROW_OP_BEST:
                    return greedy();
                case LLAMA_ROW_OP_DYNATEMP:
                    scale = dynamic_scale();
                    break;
                case LLAMA_ROW_OP_MIROSTAT:
                    top_k(mirostat_k());
                    return surprising(draw());
                case LLAMA_ROW_OP_MIROSTAT_V2:
                    mirostat_v2();
                    return surprising(draw());
            }
        }
        return draw();
    }

private:
    static constexpr float LOWEST = -std::numeric_limits<float>::max();

    const llama_row_params & params;
    const uint64_t           position;
    const int32_t            n_real, n_vocab;
    const float *            row = nullptr; // NULL: the list
    float                    low = LOWEST, best = NONE;
    float                    scale = LRS_LOG2_E;

    // kept by each thread, since memory for a whole row is slow to get
    static std::vector<row_token> & tokens() {
        thread_local std::vector<row_token> list;
        return list;
    }

    row_part part() const { return { row, n_real, low, best, scale }; }

    uint32_t distance(const row_token & t) const { return lrs_distance(t.logit, best, scale); }

    void find_best() {
        best = NONE;
        for (const auto & t : tokens()) { best = std::max(best, t.logit); }
    }

    // from here on only the tokens of the row with at least this logit are left, as a list
    void collect(float least) {
        least                         = std::max(least, low);
        std::vector<row_token> & list = tokens();
        list.clear();
        for (int32_t start = 0; start < n_real; start += BLOCK) {
            const int32_t end = std::min(start + BLOCK, n_real);
            if (highest(row + start, end - start) < least) { continue; }
            for (int32_t i = start; i < end; i++) {
                if (row[i] >= least && row[i] <= best) { list.push_back({ lrs_key(lrs_order(row[i]), i), 0, row[i] }); }
            }
        }
        row = nullptr;
    }

    uint64_t weigh() {
        uint64_t sum = 0;
        for (auto & t : tokens()) { sum += t.mass = lrs_mass(distance(t)); }
        return sum;
    }

    template <typename Keep>
    void keep(Keep kept) {
        const auto dropped = [&](const row_token & t) { return !kept(t); };
        tokens().erase(std::remove_if(tokens().begin(), tokens().end(), dropped), tokens().end());
    }

    // The lowest logit that is kept, if with each logit all higher ones are.
    template <typename Keep>
    float lowest_logit(Keep kept) const {
        uint32_t no = lrs_order(low) - 1, yes = lrs_order(best);
        while (yes - no > 1) {
            const uint32_t middle                = no + (yes - no) / 2;
            (kept(lrs_logit(middle)) ? yes : no) = middle;
        }
        return lrs_logit(yes);
    }

    int32_t greedy() const {
        if (row) {
            const uint32_t order = lrs_order(best);
            int32_t        i     = 0;
            while (lrs_order(row[i]) != order) { i++; }
            return i;
        }
        uint64_t key = 0;
        for (const auto & t : tokens()) { key = std::max(key, t.key); }
        return lrs_key_id(key);
    }

    // the n best keys, in any order
    std::vector<uint64_t> best_keys(size_t n) const {
        std::vector<uint64_t> keys;
        if (row) {
            // at least n logits reach the n-th highest of the blocks' best, and few exceed it
            std::vector<float> blocks;
            for (int32_t start = 0; start + BLOCK <= n_real; start += BLOCK) { blocks.push_back(highest(row + start, BLOCK)); }
            float least = low;
            if (blocks.size() > 2 * n && best == *std::max_element(blocks.begin(), blocks.end())) {
                std::nth_element(blocks.begin(), blocks.begin() + (n - 1), blocks.end(), std::greater<float>());
                least = std::max(low, blocks[n - 1]);
            }
            for (int32_t i = 0; i < n_real; i++) {
                if (row[i] >= least && row[i] <= best) { keys.push_back(lrs_key(lrs_order(row[i]), i)); }
            }
        } else {
            for (const auto & t : tokens()) { keys.push_back(t.key); }
        }
        return best_of(std::move(keys), n);
    }

    static std::vector<uint64_t> best_of(std::vector<uint64_t> keys, size_t n) {
        if (keys.size() > n) {
            std::nth_element(keys.begin(), keys.begin() + (n - 1), keys.end(), std::greater<uint64_t>());
            keys.resize(n);
        }
        return keys;
    }

    static uint64_t lowest(const std::vector<uint64_t> & keys) { return *std::min_element(keys.begin(), keys.end()); }

    // `least`, or less so that min_keep tokens are kept
    uint64_t or_less(uint64_t least) const { return params.min_keep > 1 ? std::min(least, lowest(best_keys(params.min_keep))) : least; }

    // from here on only tokens with at least this key are left, as a list
    void keep_from(uint64_t least) {
        if (row) { collect(lrs_logit(least >> 32)); }
        keep([&](const row_token & t) { return t.key >= least; });
    }

    void top_k(size_t k) { keep_from(lowest(best_keys(k))); }

    size_t count() const { return row ? total_count(part()) : tokens().size(); }

    float dynamic_scale() {
        uint64_t total = row ? total_mass(part()) : weigh(), moments = row ? total_moments(part()) : 0;
        if (!row) {
            for (const auto & t : tokens()) { moments += lrs_moment(distance(t), t.mass); }
        }
        return lrs_dynamic_scale(params, count(), total, moments, scale);
    }

    uint32_t mirostat_k() const {
        std::vector<uint64_t> keys = best_keys(LRS_MIROSTAT_M);
        std::sort(keys.begin(), keys.end(), std::greater<uint64_t>());
        uint64_t products = 0, squares = 0;
        for (size_t i = 0; i + 1 < keys.size(); i++) {
            const uint32_t near = lrs_distance(lrs_logit(keys[i] >> 32), best, scale), far = lrs_distance(lrs_logit(keys[i + 1] >> 32), best, scale);
            products += lrs_zipf_step(i) * (far - near);
            squares += lrs_zipf_step(i) * lrs_zipf_step(i);
        }
        return lrs_mirostat_k(params.mu, products, squares, n_vocab);
    }

    void mirostat_v2() {
        const uint32_t reach = lrs_mirostat_reach(params.mu, row ? total_mass(part()) : weigh());
        if (row) {
            const float highest = best;
            low                 = lowest_logit([&](float logit) { return lrs_distance(logit, highest, scale) <= reach; });
        } else {
            keep([&](const row_token & t) { return distance(t) <= reach; });
        }
    }

    int32_t surprising(int32_t token) {
        float logit = row ? row[token] : 0;
        for (const auto & t : tokens()) {
            if (!row && (int32_t) lrs_key_id(t.key) == token) { logit = t.logit; }
        }
        surprise = lrs_surprise(row ? total_mass(part()) : weigh()) + (int32_t) lrs_distance(logit, best, scale);
        return token;
    }

    static uint64_t mass_of(const row_token & t) { return t.mass; }

    void top_p() {
        const auto     as_is  = [](uint32_t far) { return far; };
        const auto     key_of = [&](int32_t i, uint32_t) { return lrs_key(lrs_order(row[i]), i); };
        const uint64_t least  = row ? lowest_of_row(params.top_p, as_is, key_of) : lowest_kept(tokens(), lrs_part(weigh(), params.top_p), mass_of);
        const uint64_t kept   = or_less(least);
        if (row && lrs_key_id(kept) == UINT32_MAX) { // does not cut between equal logits
            low = lrs_logit(kept >> 32);
            return;
        }
        keep_from(kept);
    }

    // The lowest key of the best tokens of the row that have this part of its mass. rank_of(distance) is lower for better
    // ones; key_of(id, distance) orders them exactly. Masses are added up by coarse rank, then by a finer one within the
    // lot where they reach the part, and last one by one. The key's low half is 0 if no equal ones are cut apart.
    template <typename Rank, typename Key>
    uint64_t lowest_of_row(uint32_t share, Rank rank_of, Key key_of) {
        thread_local std::vector<uint32_t>  far;
        thread_local std::vector<row_token> same;
        far.resize(n_real);
        uint64_t masses[2048] = { 0 }, total = 0, mass[BLOCK];
        for (int32_t start = 0; start < n_real; start += BLOCK) {
            const int32_t n = std::min(BLOCK, n_real - start);
            weigh_block(part(), start, n, far.data() + start, mass);
            for (int32_t i = 0; i < n; i++) { masses[rank_of(far[start + i]) >> 19] += mass[i]; }
        }
        for (uint64_t m : masses) { total += m; }
        uint64_t   need  = lrs_part(total, share);
        const auto reach = [&] {
            uint32_t bin = 0;
            for (; masses[bin] < need; bin++) { need -= masses[bin]; }
            return bin;
        };
        const uint32_t coarse = reach();
        std::fill(masses, masses + 2048, 0);
        for (int32_t i = 0; i < n_real; i++) {
            const uint32_t rank = rank_of(far[i]);
            if (rank >> 19 == coarse) { masses[rank >> 8 & 2047] += lrs_mass(far[i]); }
        }
        const uint32_t fine = coarse << 11 | reach();
        same.clear();
        for (int32_t i = 0; i < n_real; i++) {
            if (rank_of(far[i]) >> 8 == fine && row[i] >= low && row[i] <= best) { same.push_back({ key_of(i, far[i]), lrs_mass(far[i]), row[i] }); }
        }
        const uint64_t least = lowest_kept(same, need, mass_of);
        for (const auto & t : same) {
            if (t.key >> 32 == least >> 32 && t.key < least) { return least; }
        }
        return least & ~0xffffffffull;
    }

    void min_p() {
        const float    highest = best;
        const float    lowest  = lowest_logit([&](float logit) { return lrs_distance(logit, highest, scale) <= params.min_p; });
        const uint64_t least = (uint64_t) lrs_order(lowest) << 32, kept = or_less(least);
        if (row && kept == least) {
            low = lowest;
        } else {
            keep_from(kept);
        }
    }

    void top_n_sigma() {
        row_sums all;
        if (row) {
            all = sums_below(part());
        } else {
            for (const auto & t : tokens()) {
                const uint64_t below = lrs_below(t.logit, best);
                all.n++;
                all.sum += below;
                all.squares += below * below;
            }
        }
        const uint32_t reach = lrs_sigma(all.n, all.sum, all.squares, params.n_sigma);
        const auto     kept  = [&](float logit) { return lrs_below(logit, best) <= reach; };
        if (row) {
            low = lowest_logit(kept);
        } else {
            keep([&](const row_token & t) { return kept(t.logit); });
        }
    }

    void typical() {
        uint64_t total, moments = 0;
        if (row) {
            total   = total_mass(part());
            moments = total_moments(part());
        } else {
            total = weigh();
            for (const auto & t : tokens()) { moments += lrs_moment(distance(t), t.mass); }
        }
        const uint32_t mean = lrs_mean_distance(moments, total);
        if (row) {
            typical_of_row(mean);
            return;
        }
        const auto key_of = [&](const row_token & t) { return lrs_key(lrs_typical_order(distance(t), mean), lrs_key_id(t.key)); };
        thread_local std::vector<row_token> ordered;
        ordered = tokens();
        for (auto & t : ordered) { t.key = key_of(t); }
        uint64_t least = lowest_kept(ordered, lrs_part(total, params.typical), mass_of);
        if (params.min_keep > 1) {
            std::vector<uint64_t> keys;
            keys.reserve(ordered.size());
            for (const auto & t : ordered) { keys.push_back(t.key); }
            least = std::min(least, lowest(best_of(std::move(keys), params.min_keep)));
        }
        keep([&](const row_token & t) { return key_of(t) >= least; });
        find_best();
    }

    void typical_of_row(uint32_t mean) {
        const auto               rank_of = [=](uint32_t far) { return ~lrs_typical_order(far, mean); };
        const auto               key_of  = [=](int32_t i, uint32_t far) { return lrs_key(lrs_typical_order(far, mean), i); };
        uint64_t                 least   = lowest_of_row(params.typical, rank_of, key_of);
        std::vector<row_token> & list    = tokens();
        if (params.min_keep > 1) {
            std::vector<uint64_t> keys;
            for (int32_t i = 0; i < n_real; i++) {
                if (row[i] >= low && row[i] <= best) { keys.push_back(key_of(i, lrs_distance(row[i], best, scale))); }
            }
            least = std::min(least, lowest(best_of(std::move(keys), params.min_keep)));
        }
        list.clear();
        for (int32_t i = 0; i < n_real; i++) {
            if (row[i] >= low && row[i] <= best && key_of(i, lrs_distance(row[i], best, scale)) >= least) {
                list.push_back({ lrs_key(lrs_order(row[i]), i), 0, row[i] });
            }
        }
        row = nullptr;
        find_best();
    }

    void xtc() {
        const uint64_t seed = lrs_row_seed(params.seed, position, LRS_STREAM_XTC);
        if (lrs_random(seed, 0) >= params.xtc) { return; }
        const uint64_t least = lrs_part(row ? total_mass(part()) : weigh(), params.xtc_least);
        if (row) {
            // what is removed goes on from the best, so a row may be left, but few remove less than a logit's ties
            const float lowest = lowest_logit([&](float logit) { return lrs_mass(lrs_distance(logit, best, scale)) >= least; });
            int32_t     n      = 0;
            for (int32_t i = 0; i < n_real; i++) { n += row[i] >= lowest && row[i] <= best; }
            if (n < 2) { return; }
            collect(low);
            weigh();
        }
        uint64_t lowest = UINT64_MAX, above = 0;
        for (const auto & t : tokens()) {
            if (t.mass >= least) {
                lowest = std::min(lowest, t.key);
                above++;
            }
        }
        if (params.min_keep > 1 && tokens().size() + 1 < above + params.min_keep) { return; }
        keep([&](const row_token & t) { return t.mass < least || t.key <= lowest; });
        find_best();
    }

    int32_t draw() const {
        const uint64_t seed  = lrs_row_seed(params.seed, position, LRS_STREAM_DRAW);
        uint64_t       found = 0;
        const auto     offer = [&](uint32_t id, uint32_t far, uint32_t high) {
            if (far <= LRS_LAST && high <= lrs_high_bound(far, (uint32_t) (found >> 32))) {
                const uint64_t random = (uint64_t) high << 32 | lrs_random_low(seed, id, high);
                found                 = std::max(found, lrs_key(lrs_score(far, random), id));
            }
        };
        if (!row) {
            for (const auto & t : tokens()) {
                const uint32_t id = lrs_key_id(t.key);
                offer(id, distance(t), lrs_random(seed, id));
            }
            return lrs_key_id(found);
        }
        int32_t  start = 0;
        uint32_t high[BLOCK], far[BLOCK];
        for (; start + BLOCK <= n_real; start += BLOCK) {
            noise_block(part(), start, seed, high, far);
            if (any_in_bounds(high, far, (uint32_t) (found >> 32))) {
                for (int32_t i = 0; i < BLOCK; i++) { offer(start + i, far[i], high[i]); }
            }
        }
        for (; start < n_real; start++) { offer(start, part().distance(start), lrs_random(seed, start)); }
        return lrs_key_id(found);
    }
};
