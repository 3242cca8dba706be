// Samples rows on the host, with the arithmetic of llama-row-sampler.h. Bound by qwen_serve/llamacpp/row_sampler.py.

#include "llama-row-choice.h"
#include "llama-row-threads.h"

#include <cmath>

#if defined(_WIN32)
#define LLAMA_ROW_API extern "C" __declspec(dllexport)
#else
#define LLAMA_ROW_API extern "C" __attribute__((visibility("default")))
#endif

// The log-probabilities of the row as the model computed it.
static void score(const float * logits, const llama_row_request & row, llama_row_result & result, int32_t n_vocab, int32_t n_real) {
    result.best         = highest(logits, n_vocab);
    result.mass         = total_mass({ logits, n_vocab, -std::numeric_limits<float>::max(), result.best, LRS_LOG2_E });
    result.logit        = logits[result.token];
    const uint64_t mine = lrs_key(lrs_order(result.logit), result.token);
    result.rank         = 1;
    for (int32_t i = 0; i < n_real; i++) { result.rank += lrs_key(lrs_order(logits[i]), i) > mine; }
    if (row.n_top <= 0) { return; }
    // the bound of top_k, kept small enough for a sort
    std::vector<float> blocks;
    for (int32_t start = 0; start < n_real; start += BLOCK) { blocks.push_back(highest(logits + start, std::min(BLOCK, n_real - start))); }
    const size_t k     = std::min(row.n_top, LLAMA_ROW_MAX_TOP);
    float        least = NONE;
    if (blocks.size() > k) {
        std::vector<float> ordered = blocks;
        std::nth_element(ordered.begin(), ordered.begin() + (k - 1), ordered.end(), std::greater<float>());
        least = ordered[k - 1];
    }
    std::vector<uint64_t> keys;
    for (size_t block = 0; block < blocks.size(); block++) {
        const int32_t start = block * BLOCK, end = std::min(start + BLOCK, n_real);
        for (int32_t i = start; blocks[block] >= least && i < end; i++) {
            if (logits[i] >= least) { keys.push_back(lrs_key(lrs_order(logits[i]), i)); }
        }
    }
    result.n_top = std::min(k, keys.size());
    std::partial_sort(keys.begin(), keys.begin() + result.n_top, keys.end(), std::greater<uint64_t>());
    for (int32_t i = 0; i < result.n_top; i++) {
        result.top[i]        = lrs_key_id(keys[i]);
        result.top_logits[i] = logits[result.top[i]];
    }
}

static int32_t choose(const float * logits, const llama_row_request & row, int32_t n_real, int32_t n_vocab, int32_t & surprise) {
    thread_local std::vector<float> changed;
    if (row.n_edits || row.mask) {
        changed.assign(logits, logits + n_real);
        for (int32_t i = 0; i < row.n_edits; i++) {
            float & logit = changed[row.edits[i].token];
            logit         = lrs_edited(row.edits[i], row.repetition, logit);
        }
        for (int32_t i = 0; row.mask && i < n_real; i += 32) {
            const uint32_t word = row.mask[i / 32];
            if (word == 0xffffffffu) { continue; }
            for (int32_t j = i; j < std::min(i + 32, n_real); j++) {
                if (!(word >> (j - i) & 1)) { changed[j] = NONE; }
            }
        }
        logits = changed.data();
    }
    row_choice choice(row, n_real, n_vocab);
    choice.whole(logits);
    const int32_t token = choice.token();
    surprise            = choice.surprise;
    return token;
}

static void sample(const llama_row_request & row, const float * logits, llama_row_result & result, int32_t n_vocab, int32_t n_real) {
    result       = {};
    result.token = -1;
    if (!logits) {
        result.status = LLAMA_ROW_MISSING;
        return;
    }
    const row_scan found = row.n_top == LLAMA_ROW_UNCHECKED ? row_scan{ false, false } : scan(logits, n_vocab);
    result.status        = found.unusable ? LLAMA_ROW_NOT_FINITE : found.zeros ? LLAMA_ROW_ZERO : LLAMA_ROW_OK;
    if (result.status) { return; }
    result.token = row.scored >= 0 ? row.scored : choose(logits, row, n_real, n_vocab, result.surprise);
    if (result.token < 0) {
        result.status = LLAMA_ROW_NONE_LEFT;
    } else if (row.n_top >= 0) {
        score(logits, row, result, n_vocab, n_real);
    }
}

void llama_rows_on_host(const llama_row_request * rows, const float * const * logits, llama_row_result * results, int32_t n, int32_t n_vocab,
        int32_t n_real, int32_t n_threads) {
    const auto each = [&](int i) { sample(rows[i], logits[i], results[i], n_vocab, n_real); };
    if (n == 1 || n_threads <= 1) {
        for (int i = 0; i < n; i++) { each(i); }
        return;
    }
    static row_threads * threads = new row_threads();
    threads->run([](void * data, int i) { (*(const decltype(each) *) data)(i); }, (void *) &each, n, n_threads);
}

// --- the interface -----------------------------------------------------------------------------------------------

LLAMA_ROW_API llama_row_sampler * llama_row_sampler_init(const llama_row_params * params, int32_t n_real) {
    llama_row_sampler * sampler = new llama_row_sampler();
    sampler->params             = *params;
    sampler->n_real             = n_real;
    return sampler;
}

LLAMA_ROW_API void llama_row_sampler_free(llama_row_sampler * sampler) { delete sampler; }

// Adds to the logits of tokens.
LLAMA_ROW_API void llama_row_sampler_bias(llama_row_sampler * sampler, const int32_t * ids, const float * bias, int32_t n) {
    for (int32_t i = 0; i < n; i++) { sampler->of(ids[i]).add += bias[i]; }
}

// Only these tokens may be chosen.
LLAMA_ROW_API void llama_row_sampler_allow(llama_row_sampler * sampler, const int32_t * ids, int32_t n) {
    sampler->allowed.assign((sampler->n_real + 31) / 32, 0);
    for (int32_t i = 0; i < n; i++) { sampler->allowed[ids[i] / 32] |= 1u << (ids[i] % 32); }
}

// These tokens are not chosen before the answer has `until` tokens.
LLAMA_ROW_API void llama_row_sampler_ban(llama_row_sampler * sampler, const int32_t * ids, int32_t n, int32_t until) {
    for (int32_t i = 0; i < n; i++) {
        int32_t & banned = sampler->of(ids[i]).banned_until;
        banned           = std::max(banned, until);
    }
}

// The last of these tokens is not chosen after all the others.
LLAMA_ROW_API void llama_row_sampler_bad_word(llama_row_sampler * sampler, const int32_t * ids, int32_t n) {
    sampler->bad_words.emplace_back(ids, ids + n);
    sampler->of(ids[n - 1]);
}

// Penalties on tokens seen. last_n -2: repetition counts the prompt and the answer, the others the answer alone; -1:
// all count both; from 0: all count the last last_n tokens of both. Returns the number of these penalties, which is 0 or
// 1; the latter has no presence or frequency.
LLAMA_ROW_API int32_t llama_row_sampler_penalties(
        llama_row_sampler * sampler, float repetition, float presence, float frequency, int32_t last_n, const int32_t * prompt, int32_t n) {
    const size_t  i = sampler->penalties.size();
    row_penalties each;
    each.repetition = repetition;
    each.presence   = presence;
    each.frequency  = frequency;
    each.last_n     = last_n;
    sampler->penalties.push_back(std::move(each));
    for (int32_t j = 0; j < n; j++) {
        if (prompt[j] < 0 || prompt[j] >= sampler->n_real) {
            continue; // a picture
        }
        if (last_n == -2) {
            if (repetition != 1.0f) { sampler->of(prompt[j]).in_prompt[i] = true; }
        } else {
            sampler->count(i, prompt[j]);
        }
    }
    return (int32_t) i;
}

// Begins Mirostat, whose op is in the params.
LLAMA_ROW_API void llama_row_sampler_mirostat(llama_row_sampler * sampler, float tau, float eta) {
    sampler->tau = tau;
    sampler->eta = eta;
    sampler->set_mu(2 * tau);
}

// Takes the surprise of a token that was chosen.
LLAMA_ROW_API void llama_row_sampler_observe(llama_row_sampler * sampler, int32_t surprise) {
    sampler->set_mu(sampler->mu - sampler->eta * (surprise / (float) (1 << LRS_Q) - sampler->tau));
}

LLAMA_ROW_API void llama_row_sampler_set_active(llama_row_sampler * sampler, int32_t penalties, bool active) {
    sampler->penalties[penalties].active = active;
}

// Takes the answer's next token.
LLAMA_ROW_API void llama_row_sampler_accept(llama_row_sampler * sampler, int32_t token) { sampler->accept(token); }

// Undoes the last accept, of this token.
LLAMA_ROW_API void llama_row_sampler_take_back(llama_row_sampler * sampler, int32_t token) { sampler->take_back(token); }

// Chooses a token from each of n rows [n_vocab]; neither the rows nor the samplers change.
LLAMA_ROW_API void llama_row_sample(
        const llama_row_ask * asks, const float * const * logits, llama_row_result * results, int32_t n, int32_t n_vocab, int32_t n_threads) {
    llama_row_requests requests;
    requests.fill(asks, n, n_vocab);
    llama_rows_on_host(requests.rows.data(), logits, results, n, n_vocab, n ? asks->sampler->n_real : 0, n_threads);
}
