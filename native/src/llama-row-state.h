// One request's rules and penalties, which follow its answer, and the requests for its rows that they become.
#pragma once

#include "llama-row-sampler.h"

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <utility>
#include <vector>

static const float NONE = -std::numeric_limits<float>::infinity(); // the logit of a token that may not be chosen

#define LLAMA_ROW_ALWAYS INT32_MAX

struct row_penalties {
    float                repetition = 1, presence = 0, frequency = 0;
    bool                 active = true;
    int32_t              last_n = -1; // negative: no window
    std::vector<int32_t> seen;        // with a window, all tokens
};

struct llama_row_sampler {
    // what is known of one token
    struct entry {
        int32_t token;
        float   add          = 0;
        int32_t banned_until = 0; // the number of tokens for which it is banned
        int32_t count[2]     = { 0, 0 };
        bool    in_prompt[2] = { false, false };
    };

    llama_row_params                    params;
    int32_t                             n_real;
    uint64_t                            position = 0;             // tokens of the answer
    float                               mu = 0, tau = 0, eta = 0; // of Mirostat
    std::vector<entry>                  entries;
    std::unordered_map<int32_t, size_t> places;
    std::vector<uint32_t>               allowed; // a bit a token; empty: all
    std::vector<std::vector<int32_t>>   bad_words;
    std::vector<int32_t>                last; // the answer's tokens, if bad words need them
    std::vector<row_penalties>          penalties;

    entry & of(int32_t token) {
        const auto [it, added] = places.try_emplace(token, entries.size());
        if (added) {
            entries.emplace_back();
            entries.back().token = token;
        }
        return entries[it->second];
    }

    // counts a token `by` times for the i-th penalties, at the end of what they have seen
    void count(size_t i, int32_t token) {
        row_penalties & each = penalties[i];
        of(token).count[i]++;
        if (each.last_n < 0) { return; }
        each.seen.push_back(token);
        if ((int32_t) each.seen.size() > each.last_n) { of(each.seen[each.seen.size() - 1 - each.last_n]).count[i]--; }
    }

    void set_mu(float value) {
        mu        = value;
        params.mu = (int32_t) (std::min(std::max(value, -100.0f), 100.0f) * (1 << LRS_Q));
    }

    void accept(int32_t token) {
        position++;
        if (!bad_words.empty()) { last.push_back(token); }
        if (token < 0 || token >= n_real) { return; }
        for (size_t i = 0; i < penalties.size(); i++) { count(i, token); }
    }

    // undoes the last accept
    void take_back(int32_t token) {
        position--;
        if (!bad_words.empty()) { last.pop_back(); }
        if (token < 0 || token >= n_real) { return; }
        for (size_t i = 0; i < penalties.size(); i++) {
            row_penalties & each = penalties[i];
            of(token).count[i]--;
            if (each.last_n < 0) { continue; }
            if ((int32_t) each.seen.size() > each.last_n) { of(each.seen[each.seen.size() - 1 - each.last_n]).count[i]++; }
            each.seen.pop_back();
        }
    }

    // appends the edits of the next row
    void edit(std::vector<llama_row_edit> & edits) const {
        const size_t first = edits.size();
        for (const entry & e : entries) {
            llama_row_edit made = { e.token, 0, e.add, 0 };
            if ((uint64_t) std::max(e.banned_until, 0) > position) { made.flags |= LLAMA_ROW_BANNED; }
            for (size_t i = 0; i < penalties.size(); i++) {
                const row_penalties & each = penalties[i];
                if (!each.active || !(e.count[i] > 0 || e.in_prompt[i])) { continue; }
                made.flags |= i ? LLAMA_ROW_SEEN_WITHIN : LLAMA_ROW_SEEN;
                if (e.count[i] > 0) { made.less += each.presence + lrs_mul(each.frequency, (float) e.count[i]); }
            }
            edits.push_back(made);
        }
        for (const auto & word : bad_words) {
            const size_t before = word.size() - 1;
            if (last.size() >= before && std::equal(word.begin(), word.end() - 1, last.end() - before)) {
                edits[first + places.at(word.back())].flags |= LLAMA_ROW_BANNED;
            }
        }
    }
};

// What is wanted of a row: that behind the token `index` of a batch, or another.
struct llama_row_ask {
    llama_row_sampler * sampler; // NULL: the whole row, on the host
    const uint32_t *    mask;    // a bit for each token that may be chosen; NULL: all. Stays until the row is sampled
    int32_t             n_mask;  // words of the mask; tokens behind them are not allowed
    int32_t             index;
    int32_t             n_top;  // as in llama_row_request
    int32_t             scored; // as in llama_row_request
    int32_t             draft;  // the next row, of the same sampler, is behind this token; -1: it is the last one
    const int32_t *     ids;    // tokens whose logits are lowered in this row alone, each once
    const float *       less;   // by so much
    int32_t             n_less;
    bool                less_first; // before the penalties, not after them
};

// Requests with what they point to.
struct llama_row_requests {
    std::vector<llama_row_request>     rows;
    std::vector<llama_row_edit>        edits;
    std::vector<std::vector<uint32_t>> merged; // masks that are not the caller's
    size_t                             n_masks = 0, words = 0;

    size_t edits_at() const { return (rows.size() * sizeof(llama_row_request) + 15) / 16 * 16; }

    size_t masks_at() const { return edits_at() + edits.size() * sizeof(llama_row_edit); }

    size_t bytes() const { return masks_at() + n_masks * words * sizeof(uint32_t); }

    // Copies all to `from`, with pointers that hold when it lies at `to`.
    void copy(char * from, char * to) const {
        std::copy(rows.begin(), rows.end(), (llama_row_request *) from);
        size_t mask_at = masks_at();
        for (size_t i = 0; i < rows.size(); i++) {
            llama_row_request & row = ((llama_row_request *) from)[i];
            if (row.edits) { row.edits = (llama_row_edit *) (to + edits_at()) + (row.edits - edits.data()); }
            if (row.mask) {
                std::copy(row.mask, row.mask + words, (uint32_t *) (from + mask_at));
                row.mask = (const uint32_t *) (to + mask_at);
                mask_at += words * sizeof(uint32_t);
            }
        }
        std::copy(edits.begin(), edits.end(), (llama_row_edit *) (from + edits_at()));
    }

    // changes the edits from `first` on, which are those of the sampler's entries, for the tokens of this row alone
    void lower(const llama_row_ask & ask, size_t first) {
        for (int32_t k = 0; k < ask.n_less; k++) {
            const auto found = ask.sampler->places.find(ask.ids[k]);
            if (found == ask.sampler->places.end()) { edits.push_back({ ask.ids[k], 0, 0, 0 }); }
            llama_row_edit & edit = found == ask.sampler->places.end() ? edits.back() : edits[first + found->second];
            if (ask.less_first) {
                edit.add -= ask.less[k];
            } else {
                edit.less += ask.less[k];
            }
        }
    }

    void fill(const llama_row_ask * asks, int32_t n, int32_t n_vocab) {
        words   = (n_vocab + 31) / 32;
        n_masks = 0;
        rows.clear();
        edits.clear();
        merged.clear();
        std::vector<size_t>  first_edit;
        std::vector<int32_t> drafted;
        for (int32_t i = 0; i < n; i++) {
            const llama_row_ask & ask = asks[i];
            if (!ask.sampler) {
                rows.emplace_back();
                first_edit.push_back(edits.size());
                continue;
            }
            llama_row_sampler & sampler = *ask.sampler;
            llama_row_request   made    = {
                sampler.params, sampler.position, nullptr, nullptr, 0, { 1, 1 },
                     ask.n_top, ask.scored
            };
            first_edit.push_back(edits.size());
            if (ask.scored < 0) {
                sampler.edit(edits);
                lower(ask, first_edit[i]);
                for (size_t k = 0; k < sampler.penalties.size(); k++) { made.repetition[k] = sampler.penalties[k].repetition; }
                if (ask.mask && ask.n_mask >= (int32_t) words && sampler.allowed.empty()) {
                    made.mask = ask.mask;
                } else if (ask.mask || !sampler.allowed.empty()) {
                    merged.push_back(sampler.allowed);
                    if (ask.mask) { merged.back().assign(ask.mask, ask.mask + std::min<size_t>(ask.n_mask, words)); }
                    merged.back().resize(words, 0);
                    for (size_t k = 0; k < sampler.allowed.size(); k++) { merged.back()[k] &= sampler.allowed[k]; }
                    made.mask = merged.back().data();
                }
                n_masks += made.mask != nullptr;
            }
            made.n_edits = edits.size() - first_edit[i];
            rows.push_back(made);
            if (ask.draft >= 0) {
                sampler.accept(ask.draft);
                drafted.push_back(ask.draft);
            } else {
                for (; !drafted.empty(); drafted.pop_back()) { sampler.take_back(drafted.back()); }
            }
        }
        for (int32_t i = 0; i < n; i++) { rows[i].edits = rows[i].n_edits ? edits.data() + first_edit[i] : nullptr; }
    }
};

// Samples rows on the host, on several threads. logits[i]: [n_vocab], NULL for a row that is missing.
void llama_rows_on_host(const llama_row_request * rows, const float * const * logits, llama_row_result * results, int32_t n, int32_t n_vocab,
        int32_t n_real, int32_t n_threads);
