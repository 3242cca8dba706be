// Samples rows on the host, with the arithmetic of llama-row-sampler.h. Bound by qwen_serve/llamacpp/row_sampler.py.

#include "llama-row-choice.h"
#include "llama-row-threads.h"

#include <cmath>

#if defined(_WIN32)
#define LLAMA_ROW_API extern "C" __declspec(dllexport)
#else
#define LLAMA_ROW_API extern "C" __attribute__((visibility("default")))
#endif

// --- rows --------------------------------------------------------------------------------------------------------

enum llama_row_status : int32_t {
    LLAMA_ROW_OK = 0,
    LLAMA_ROW_NOT_FINITE, // a logit is NaN or infinite
    LLAMA_ROW_ZERO,       // all logits are 0
    LLAMA_ROW_NONE_LEFT,  // the rules leave no token
    LLAMA_ROW_NONE_FITS,  // the mask leaves no token
    LLAMA_ROW_UNSETTLED,  // the candidates do not determine the choice
};

#define LLAMA_ROW_MAX_TOP 20

struct llama_row {
    llama_row_sampler * sampler;
    const float *       logits; // [n_vocab], or of the candidates [n]
    const int32_t *     ids;    // the candidates' tokens; NULL for a whole row
    const uint32_t *    mask;   // a bit for each token that may be chosen; NULL: all
    int32_t             n;      // length of the row, padding included, or number of candidates
    int32_t             n_mask; // words of the mask; tokens behind them are not allowed
    double              number; // draws by the sum of masses, best first, from 0 to 1; negative: by noise
    float               lowest; // no token that is not a candidate has a higher logit
    int32_t             n_top;  // likeliest tokens to return with log-probabilities; negative: none at all
    int32_t             scored; // the token whose log-probability is wanted instead of a choice, or -1
    // results
    int32_t status;
    int32_t token;
    int32_t rank; // 1 for the likeliest token; of equally likely ones the lowest id comes first
    float   logprob;
    int32_t top[LLAMA_ROW_MAX_TOP];
    float   top_logprobs[LLAMA_ROW_MAX_TOP];
};

static bool in_mask(const llama_row & row, uint32_t token) {
    return !row.mask || (token / 32 < (uint32_t) row.n_mask && row.mask[token / 32] >> (token % 32) & 1);
}

static int32_t n_allowed(const llama_row & row, int32_t n_real) {
    int32_t n = 0;
    for (int32_t i = 0; i < n_real; i += 32) {
        uint32_t word = i / 32 < row.n_mask ? row.mask[i / 32] : 0;
        word &= n_real - i < 32 ? (1u << (n_real - i)) - 1 : 0xffffffffu;
        for (; word; word &= word - 1) { n++; }
    }
    return n;
}

// The log-probabilities of the row as the model computed it.
static void score(llama_row & row, int32_t n_real, int32_t token) {
    const float  best    = highest(row.logits, row.n);
    const double sum     = std::log((double) total_mass({ row.logits, row.n, -std::numeric_limits<float>::max(), best, LRS_LOG2_E })) -
                           30.498475944637593; // 44 ln 2
    const auto   logprob = [&](int32_t id) { return (float) ((double) row.logits[id] - best - sum); };
    const float  chosen  = row.logits[token];
    int32_t      rank    = 1;
    for (int32_t i = 0; i < n_real; i++) { rank += row.logits[i] > chosen || (row.logits[i] == chosen && i < token); }
    row.rank    = rank;
    row.logprob = logprob(token);
    if (row.n_top <= 0) { return; }
    // the bound of top_k, kept small enough for a sort
    std::vector<float> blocks;
    for (int32_t start = 0; start < n_real; start += BLOCK) { blocks.push_back(highest(row.logits + start, std::min(BLOCK, n_real - start))); }
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
            if (row.logits[i] >= least) { keys.push_back(lrs_key(lrs_order(row.logits[i]), i)); }
        }
    }
    const size_t n = std::min(k, keys.size());
    std::partial_sort(keys.begin(), keys.begin() + n, keys.end(), std::greater<uint64_t>());
    for (size_t i = 0; i < k; i++) {
        row.top[i]          = i < n ? (int32_t) lrs_key_id(keys[i]) : -1;
        row.top_logprobs[i] = i < n ? logprob(row.top[i]) : NONE;
    }
}

static void choose_among(llama_row & row, const llama_row_sampler & sampler) {
    row_choice               choice(sampler);
    std::vector<row_token> & tokens = choice.candidates();
    int32_t                  inside = 0;
    bool                     hidden = row.lowest > NONE; // whether the tokens that are not candidates may matter
    for (int32_t i = 0; i < row.n; i++) {
        const int32_t id = row.ids[i];
        if (id >= sampler.n_real || !in_mask(row, id)) { continue; }
        inside++;
        const float logit = sampler.applied(id, row.logits[i]);
        if (logit > NONE) { tokens.push_back({ lrs_key(lrs_order(logit), id), 0, logit }); }
    }
    if (hidden && row.mask && inside == n_allowed(row, sampler.n_real)) { hidden = false; }
    const uint8_t op     = sampler.params.ops[0];
    const size_t  wanted = op == LLAMA_ROW_OP_BEST ? 1 : op == LLAMA_ROW_OP_TOP_K ? sampler.params.top_k : SIZE_MAX;
    if (hidden) {
        tokens.erase(std::remove_if(tokens.begin(), tokens.end(), [&](const row_token & t) { return t.logit <= row.lowest; }), tokens.end());
        if (tokens.size() < wanted && (op != LLAMA_ROW_OP_TOP_K || tokens.empty() || !choice.settled(wanted - tokens.size(), row.lowest))) {
            row.status = LLAMA_ROW_UNSETTLED;
            return;
        }
    }
    row.token  = choice.token(row.number);
    row.status = row.token < 0 ? LLAMA_ROW_UNSETTLED : LLAMA_ROW_OK;
}

static void choose(llama_row & row, const llama_row_sampler & sampler) {
    thread_local std::vector<float> changed;
    const float *                   logits = row.logits;
    const int32_t                   n      = sampler.n_real;
    if (sampler.has_rules() || row.mask) {
        changed.assign(logits, logits + n);
        sampler.apply_rules(changed.data());
        if (highest(changed.data(), n) == NONE) {
            row.status = LLAMA_ROW_NONE_LEFT;
            return;
        }
        sampler.apply_penalties(changed.data());
        for (int32_t i = 0; row.mask && i < n; i += 32) {
            const uint32_t word = i / 32 < row.n_mask ? row.mask[i / 32] : 0;
            if (word == 0xffffffffu) { continue; }
            for (int32_t j = i; j < std::min(i + 32, n); j++) {
                if (!(word >> (j - i) & 1)) { changed[j] = NONE; }
            }
        }
        logits = changed.data();
    }
    row_choice choice(sampler);
    choice.whole(logits);
    row.token  = choice.token(row.number);
    row.status = row.token < 0 ? LLAMA_ROW_NONE_FITS : LLAMA_ROW_OK;
}

static void sample(llama_row & row) {
    const llama_row_sampler & sampler = *row.sampler;
    row.token                         = -1;
    if (row.ids) {
        choose_among(row, sampler);
        return;
    }
    const row_scan found = scan(row.logits, row.n);
    row.status           = found.unusable ? LLAMA_ROW_NOT_FINITE : found.zeros ? LLAMA_ROW_ZERO : LLAMA_ROW_OK;
    if (row.status) { return; }
    if (row.scored >= 0) {
        row.token = row.scored;
    } else {
        choose(row, sampler);
    }
    if (row.status == LLAMA_ROW_OK && row.n_top >= 0) { score(row, sampler.n_real, row.token); }
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
    for (int32_t i = 0; i < n; i++) { sampler->bias.emplace_back(ids[i], bias[i]); }
}

// Only these tokens may be chosen.
LLAMA_ROW_API void llama_row_sampler_allow(llama_row_sampler * sampler, const int32_t * ids, int32_t n) {
    sampler->allowed.assign(sampler->n_real, false);
    for (int32_t i = 0; i < n; i++) { sampler->allowed[ids[i]] = true; }
}

// These tokens are not chosen before the answer has `until` tokens.
LLAMA_ROW_API void llama_row_sampler_ban(llama_row_sampler * sampler, const int32_t * ids, int32_t n, int32_t until) {
    for (int32_t i = 0; i < n; i++) { sampler->bans.emplace_back(ids[i], until); }
}

// The last of these tokens is not chosen after all the others.
LLAMA_ROW_API void llama_row_sampler_bad_word(llama_row_sampler * sampler, const int32_t * ids, int32_t n) {
    sampler->bad_words.emplace_back(ids, ids + n);
    sampler->longest = std::max(sampler->longest, (size_t) n - 1);
}

// Penalties on tokens seen. last_n -2: repetition counts the prompt and the answer, the others the answer alone; -1:
// all count both; from 0: all count the last last_n tokens of both. Returns the number of these penalties.
LLAMA_ROW_API int32_t llama_row_sampler_penalties(
        llama_row_sampler * sampler, float repetition, float presence, float frequency, int32_t last_n, const int32_t * prompt, int32_t n) {
    row_penalties each;
    each.repetition = repetition;
    each.presence   = presence;
    each.frequency  = frequency;
    each.last_n     = last_n;
    for (int32_t i = 0; i < n; i++) {
        if (prompt[i] < 0 || prompt[i] >= sampler->n_real) {
            continue; // a picture
        }
        if (last_n == -2) {
            if (repetition != 1.0f) { each.of(prompt[i]).in_prompt = true; }
        } else {
            each.accept(prompt[i]);
        }
    }
    sampler->penalties.push_back(std::move(each));
    return (int32_t) sampler->penalties.size() - 1;
}

LLAMA_ROW_API void llama_row_sampler_set_active(llama_row_sampler * sampler, int32_t penalties, bool active) {
    sampler->penalties[penalties].active = active;
}

// Takes the answer's next token.
LLAMA_ROW_API void llama_row_sampler_accept(llama_row_sampler * sampler, int32_t token) {
    sampler->position++;
    if (token < 0 || token >= sampler->n_real) { return; }
    for (auto & each : sampler->penalties) { each.accept(token); }
    if (sampler->longest) {
        if (sampler->last.size() == sampler->longest) { sampler->last.erase(sampler->last.begin()); }
        sampler->last.push_back(token);
    }
}

// Applies the rules and penalties to a row [n_real], for samplers that are not among the ops. Returns a status.
LLAMA_ROW_API int32_t llama_row_sampler_apply(const llama_row_sampler * sampler, float * logits) {
    sampler->apply_rules(logits);
    if (highest(logits, sampler->n_real) == NONE) { return LLAMA_ROW_NONE_LEFT; }
    sampler->apply_penalties(logits);
    return LLAMA_ROW_OK;
}

// Chooses a token from each row; neither the rows nor the samplers change.
LLAMA_ROW_API void llama_row_sample(llama_row * rows, int32_t n, int32_t n_threads) {
    if (n == 1 || n_threads <= 1) {
        std::for_each(rows, rows + n, sample);
        return;
    }
    static row_threads * threads = new row_threads();
    threads->run([](void * data, int i) { sample(((llama_row *) data)[i]); }, rows, n, n_threads);
}
