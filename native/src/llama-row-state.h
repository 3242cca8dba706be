// One request's rules and penalties, which follow its answer.
#pragma once

#include "llama-row-sampler.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <unordered_map>
#include <utility>
#include <vector>

static const float NONE = -std::numeric_limits<float>::infinity(); // the logit of a token that may not be chosen

struct row_penalties {
    struct slot {
        int32_t token;
        int32_t count;
        bool    in_prompt;
    };

    float                               repetition, presence, frequency;
    bool                                active = true;
    int32_t                             last_n; // negative: no window
    std::vector<slot>                   slots;
    std::unordered_map<int32_t, size_t> places;
    std::deque<int32_t>                 window;

    slot & of(int32_t token) {
        const auto [it, added] = places.try_emplace(token, slots.size());
        if (added) { slots.push_back({ token, 0, false }); }
        return slots[it->second];
    }

    void accept(int32_t token) {
        if (last_n >= 0) {
            if ((int32_t) window.size() == last_n) {
                of(window.front()).count--;
                window.pop_front();
            }
            window.push_back(token);
        }
        of(token).count++;
    }

    float applied(const slot & s, float logit) const {
        const float less = s.count ? presence + lrs_mul(frequency, (float) s.count) : 0.0f;
        return lrs_penalise(logit, s.in_prompt || s.count, repetition, less);
    }
};

struct llama_row_sampler {
    llama_row_params                         params;
    int32_t                                  n_real;
    uint64_t                                 position = 0; // tokens of the answer
    std::vector<std::pair<int32_t, float>>   bias;
    std::vector<std::pair<int32_t, int32_t>> bans; // token, and the number of tokens for which it is banned
    std::vector<bool>                        allowed;
    std::vector<std::vector<int32_t>>        bad_words;
    std::vector<int32_t>                     last; // the answer's last tokens, as many as bad words need
    size_t                                   longest = 0;
    std::vector<row_penalties>               penalties;

    bool has_rules() const {
        if (!bias.empty() || !bans.empty() || !allowed.empty() || !bad_words.empty()) { return true; }
        for (const auto & each : penalties) {
            if (each.active && !each.slots.empty()) { return true; }
        }
        return false;
    }

    void apply_rules(float * logits) const {
        for (const auto & [token, more] : bias) { logits[token] += more; }
        for (const auto & [token, until] : bans) {
            if (position < (uint64_t) until) { logits[token] = NONE; }
        }
        for (size_t i = 0; i < allowed.size(); i++) {
            if (!allowed[i]) { logits[i] = NONE; }
        }
        for (const auto & word : bad_words) {
            const size_t before = word.size() - 1;
            if (last.size() >= before && std::equal(word.begin(), word.end() - 1, last.end() - before)) { logits[word.back()] = NONE; }
        }
    }

    void apply_penalties(float * logits) const {
        for (const auto & each : penalties) {
            if (each.active) {
                for (const auto & s : each.slots) { logits[s.token] = each.applied(s, logits[s.token]); }
            }
        }
    }

    // a candidate of the device: only bans and penalties come here
    float applied(int32_t token, float logit) const {
        for (const auto & [other, until] : bans) {
            if (other == token && position < (uint64_t) until) { return NONE; }
        }
        for (const auto & each : penalties) {
            const auto it = each.active ? each.places.find(token) : each.places.end();
            if (it != each.places.end()) { logit = each.applied(each.slots[it->second], logit); }
        }
        return logit;
    }
};
