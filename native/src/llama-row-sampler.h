// What a sampler computes of one logit, and of the sums over a row: the same bits on the host and in CUDA.
//
// Everything behind the first difference of two logits is integer arithmetic, so that neither the order of a sum
// nor fast math (ggml-cuda is compiled with it) changes a choice. The few products of floats go through
// lrs_mul where a compiler might fuse them with a sum.
//
// A row's tokens are ordered by logit, and equal ones by id, the lowest first (lrs_key). Filters keep a part of
// the tokens; the draw takes the best sum of logit and Gumbel noise of those left. The noise depends on seed,
// position and token alone, so the draw is the same whichever way the filters are computed.
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define LRS_FN static __host__ __device__ inline
#else
#define LRS_FN static inline
#endif

enum llama_row_op : uint8_t {
    LLAMA_ROW_OP_TOP_N_SIGMA = 1,
    LLAMA_ROW_OP_TOP_K,
    LLAMA_ROW_OP_TEMPERATURE,
    LLAMA_ROW_OP_TYPICAL,
    LLAMA_ROW_OP_TOP_P,
    LLAMA_ROW_OP_MIN_P,
    LLAMA_ROW_OP_XTC,
    LLAMA_ROW_OP_BEST, // the best token, with no draw
    LLAMA_ROW_OP_DYNATEMP,
    LLAMA_ROW_OP_MIROSTAT, // the last one, as is the next
    LLAMA_ROW_OP_MIROSTAT_V2,
};

#define LLAMA_ROW_MAX_OPS 8

// One request's filters in their order.
struct llama_row_params {
    uint64_t seed;
    int32_t  top_k;
    uint32_t top_p;     // in 2^-32
    uint32_t typical;   // in 2^-32
    uint32_t min_p;     // distance to the best token that is kept, in binary logarithms (Q24)
    uint64_t xtc;       // probability that XTC applies, in 2^-32
    uint32_t xtc_least; // probability from which it removes, in 2^-32
    float    n_sigma;
    float    scale;                  // log2(e) / temperature, from LLAMA_ROW_OP_TEMPERATURE on; before it, log2(e)
    int32_t  min_keep;               // tokens that typical, top_p, min_p and XTC leave, if there are so many
    float    temp_low, temp_range;   // dynamic temperature: at no entropy, and how much is added at the greatest
    uint32_t exponent;               // of the entropy's share, Q16
    int32_t  mu;                     // of Mirostat, Q24
    uint8_t  ops[LLAMA_ROW_MAX_OPS]; // 0 ends them
};

// --- floats ------------------------------------------------------------------------------------------------------

LRS_FN float lrs_mul(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    volatile float product = a * b;
    return product;
#endif
}

LRS_FN float lrs_div(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

// A logit after the repetition penalty (if `seen`; Keskar et al. 2019) and after `less` is subtracted.
LRS_FN float lrs_penalise(float logit, bool seen, float repetition, float less) {
    if (seen) { logit = logit > 0 ? lrs_div(logit, repetition) : lrs_mul(logit, repetition); }
    return logit - less;
}

// --- order -------------------------------------------------------------------------------------------------------

// Orders floats as numbers. Fast math flushes denormal ones to 0, so they are 0 here, and so is -0. NaN is the lowest.
LRS_FN uint32_t lrs_order(float logit) {
    uint32_t bits;
    memcpy(&bits, &logit, 4);
    if ((bits & 0x7f800000u) == 0) { bits = 0; }
    if ((bits & 0x7fffffffu) > 0x7f800000u) { return 0; }
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The logit of an order.
LRS_FN float lrs_logit(uint32_t order) {
    const uint32_t bits = order & 0x80000000u ? order & 0x7fffffffu : ~order;
    float          logit;
    memcpy(&logit, &bits, 4);
    return logit;
}

// Bigger is better: by `order`, then the lowest id.
LRS_FN uint64_t lrs_key(uint32_t order, uint32_t id) { return (uint64_t) order << 32 | (uint32_t) ~id; }

LRS_FN uint32_t lrs_key_id(uint64_t key) { return ~(uint32_t) key; }

// Whether a raw logit is NaN or infinite.
LRS_FN bool lrs_unusable(float logit) {
    uint32_t bits;
    memcpy(&bits, &logit, 4);
    return (bits & 0x7f800000u) == 0x7f800000u;
}

// --- masses ------------------------------------------------------------------------------------------------------

#define LRS_Q      24
#define LRS_FAR    (63u << LRS_Q) // the distance of every token that is this far, or farther
#define LRS_ONE    44             // the mass of the best token is 2^44: up to 2^19 tokens add up to less than 2^63
#define LRS_LOG2_E 1.44269504f

// Distance to the best logit in binary logarithms of probability, Q24.
LRS_FN uint32_t lrs_distance(float logit, float best, float scale) {
    const float far = (best - logit) * scale;
    return far < 63.0f ? (uint32_t) (int32_t) (far * 16777216.0f) : LRS_FAR;
}

// Tokens beyond this distance have no mass, and are never drawn.
#define LRS_LAST (44u << LRS_Q)

// 2^-distance, relative to the best token's.
LRS_FN uint64_t lrs_mass(uint32_t distance) {
    // 2^g of g in (0, 1], Q30: exact at both ends, 8e-9 between
    const uint32_t g   = (1u << LRS_Q) - (distance & ((1u << LRS_Q) - 1));
    uint32_t       sum = 235160;
    sum                = 1332284 + (uint32_t) (((uint64_t) sum * g) >> LRS_Q);
    sum                = 10392315 + (uint32_t) (((uint64_t) sum * g) >> LRS_Q);
    sum                = 59577496 + (uint32_t) (((uint64_t) sum * g) >> LRS_Q);
    sum                = 257943496 + (uint32_t) (((uint64_t) sum * g) >> LRS_Q);
    sum                = 744261073 + (uint32_t) (((uint64_t) sum * g) >> LRS_Q);
    sum                = 1073741824 + (uint32_t) (((uint64_t) sum * g) >> LRS_Q);
    return ((uint64_t) sum << (LRS_ONE - 31)) >> (distance >> LRS_Q);
}

// A part of a sum of masses, at least 1.
LRS_FN uint64_t lrs_part(uint64_t total, uint32_t part) {
    const uint64_t found = (total >> 32) * part + (((total & 0xffffffffu) * part) >> 32);
    return found ? found : 1;
}

// For the mean distance: a token's share, Q44, at most 0.54 * 2^44.
LRS_FN uint64_t lrs_moment(uint32_t distance, uint64_t mass) { return (mass * (distance >> 8)) >> 16; }

// The entropy is the mean distance plus a constant; typical sampling orders by the difference to it.
LRS_FN uint32_t lrs_mean_distance(uint64_t moments, uint64_t masses) { return (uint32_t) (moments / (masses >> 16)) << 8; }

LRS_FN uint32_t lrs_typical_order(uint32_t distance, uint32_t mean) { return ~(distance > mean ? distance - mean : mean - distance); }

// --- top-n-sigma -------------------------------------------------------------------------------------------------

// Distance to the best logit, Q12, at most 2^22, so that squares of 2^19 tokens can be added up.
LRS_FN uint32_t lrs_below(float logit, float best) {
    const float far = best - logit;
    return far < 1024.0f ? (uint32_t) (int32_t) (far * 4096.0f) : 1u << 22;
}

// The greatest of these that is kept: `n_sigma` standard deviations.
LRS_FN uint32_t lrs_sigma(uint64_t n, uint64_t sum, uint64_t squares, float n_sigma) {
    // the variance in Q24, rounded down; sum < 2^41, so its square is divided in two steps
    const uint64_t mean = sum / n, rest = sum % n;
    const uint64_t square   = mean * mean + (2 * mean * rest) / n + (rest * rest) / n / n;
    const uint64_t variance = squares / n > square ? squares / n - square : 0;
    uint64_t       root     = 0;
    for (uint64_t bit = 1ull << 23; bit; bit >>= 1) {
        if ((root + bit) * (root + bit) <= variance) { root += bit; }
    }
    const float reach = (float) (uint32_t) root * n_sigma;
    return reach < 4194304.0f ? (uint32_t) (int32_t) reach : 1u << 22;
}

// --- dynamic temperature and Mirostat ----------------------------------------------------------------------------

LRS_FN int64_t lrs_log2(uint64_t x);

// What has to be added to the distances of tokens so that they are surprises: of tokens with these masses together, Q24.
LRS_FN int32_t lrs_surprise(uint64_t masses) { return (int32_t) ((lrs_log2(masses) - ((int64_t) LRS_ONE << 32)) >> (32 - LRS_Q)); }

// The scale at a temperature between the least and the greatest, by the entropy's share of that of n equally likely tokens.
LRS_FN float lrs_dynamic_scale(const llama_row_params & params, uint64_t n, uint64_t masses, uint64_t moments, float scale) {
    if (n < 2) { return scale; }
    const uint64_t entropy = lrs_surprise(masses) + (uint64_t) lrs_mean_distance(moments, masses);
    const uint64_t share   = (entropy << 30) / (uint64_t) (lrs_log2(n) >> (32 - LRS_Q)); // Q30
    const uint64_t less    = share < 1 ? 30ull << LRS_Q : share >= 1ull << 30 ? 0 : (uint64_t) ((30ll << 32) - lrs_log2(share)) >> (32 - LRS_Q);
    const uint64_t far     = (less * params.exponent) >> 16;
    const uint64_t power   = lrs_mass(far < LRS_FAR ? (uint32_t) far : LRS_FAR);
    const float    part    = lrs_mul((float) (uint32_t) (power >> (LRS_ONE - 24)), 1.0f / 16777216.0f);
    const float    temp    = params.temp_low + lrs_mul(params.temp_range, part);
    return lrs_div(LRS_LOG2_E, temp > 1e-9f ? temp : 1e-9f);
}

// The greatest distance of tokens that are no more surprising than mu.
LRS_FN uint32_t lrs_mirostat_reach(int32_t mu, uint64_t masses) {
    const int64_t reach = (int64_t) mu - lrs_surprise(masses);
    return reach < 0 ? 0 : reach < LRS_FAR ? (uint32_t) reach : LRS_FAR;
}

#define LRS_MIROSTAT_M 100 // tokens from which Mirostat's first version estimates Zipf's exponent

// log2((i + 2) / (i + 1)), Q16
LRS_FN uint64_t lrs_zipf_step(uint32_t i) { return (uint64_t) (lrs_log2((uint64_t) (i + 2) << 32) - lrs_log2((uint64_t) (i + 1) << 32)) >> 16; }

// How many tokens the first version keeps (Basu et al. 2021, equation 8). `products`: sum of the steps times the differences of
// distances (Q40), `squares`: of the steps (Q32).
LRS_FN uint32_t lrs_mirostat_k(int32_t mu, uint64_t products, uint64_t squares, uint32_t n_vocab) {
    const int64_t  s    = squares ? (int64_t) ((products << 8) / squares) : 0; // the exponent, Q16
    const int64_t  some = s - (1 << 16), eps = some ? some : 1;
    const int64_t  size  = eps < 0 ? -eps : eps;
    const int64_t  far   = (size * (lrs_log2(n_vocab) >> (32 - LRS_Q))) >> 16; // eps log2(n_vocab), Q24
    const uint64_t rest  = (1ull << LRS_ONE) - lrs_mass(far < LRS_FAR ? (uint32_t) far : LRS_FAR);
    const int64_t  below = ((lrs_log2(rest ? rest : 1) - ((int64_t) LRS_ONE << 32)) >> (32 - LRS_Q)) + (eps < 0 ? far : 0);
    const int64_t  log_k = ((((lrs_log2(size) - (16ll << 32)) >> (32 - LRS_Q)) + mu - below) * (1 << 16)) / (s > 0 ? s : 1);
    if (log_k <= 0) { return 1; }
    return log_k < 30ll << LRS_Q ? (uint32_t) lrs_mass((uint32_t) (((int64_t) LRS_ONE << LRS_Q) - log_k)) : 1u << 30;
}

// --- noise -------------------------------------------------------------------------------------------------------

enum { LRS_STREAM_DRAW = 0, LRS_STREAM_XTC = 1 };

LRS_FN uint32_t lrs_mix32(uint32_t x) { // Wellons' lowbias32
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

LRS_FN uint64_t lrs_mix64(uint64_t x) { // splitmix64
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// What the noise of one row depends on; `position` counts the answer's tokens.
LRS_FN uint64_t lrs_row_seed(uint64_t seed, uint64_t position, uint64_t stream) {
    return lrs_mix64(lrs_mix64(seed) ^ lrs_mix64(position * 4 + stream));
}

// The high and the low half of a token's random number.
LRS_FN uint32_t lrs_random(uint64_t row_seed, uint32_t id) { return lrs_mix32(lrs_mix32(id + (uint32_t) row_seed) ^ (uint32_t) (row_seed >> 32)); }

LRS_FN uint32_t lrs_random_low(uint64_t row_seed, uint32_t id, uint32_t high) {
    return lrs_mix32(high + (uint32_t) (row_seed >> 32) + 0x9e3779b9u * id);
}

LRS_FN int lrs_bits(uint64_t x) {
#ifdef __CUDA_ARCH__
    return 64 - __clzll((long long) x);
#elif defined(__GNUC__)
    return x ? 64 - __builtin_clzll(x) : 0;
#else
    int n = 0;
    for (; x; x >>= 1) { n++; }
    return n;
#endif
}

// The binary logarithm of x > 0, Q32; 2e-8 of the distance to the nearest power of two.
LRS_FN int64_t lrs_log2(uint64_t x) {
    int     n = lrs_bits(x);
    int64_t m = (int64_t) ((n < 64 ? x << (64 - n) : x) >> 32); // [2^31, 2^32)
    if (m > 3037000499ll) {                                     // above the square root of 2
        m >>= 1;
    } else {
        n--;
    }
    const int64_t f   = m - (1ll << 31);
    int64_t       sum = -116814120;
    sum               = 197512923 + ((sum * f) >> 31);
    sum               = -204469030 + ((sum * f) >> 31);
    sum               = 220007028 + ((sum * f) >> 31);
    sum               = -257402597 + ((sum * f) >> 31);
    sum               = 309834405 + ((sum * f) >> 31);
    sum               = -387290204 + ((sum * f) >> 31);
    sum               = 516360704 + ((sum * f) >> 31);
    sum               = -774540870 + ((sum * f) >> 31);
    sum               = 1549082004 + ((sum * f) >> 31);
    return ((int64_t) n << 32) + ((f * sum) >> 29);
}

// Standard Gumbel noise divided by ln 2, Q24, from 64 random bits: -log2(-ln(1 - v)).
LRS_FN int64_t lrs_gumbel(uint64_t random) {
    if (random < (1ull << 56)) { // by the series: the difference to 1 has too few bits
        const uint64_t v = random >> 32, v2 = (v * v) >> 32, v3 = (v2 * v) >> 32;
        const uint64_t more = v / 2 + v2 / 3 + v3 / 4;
        const uint64_t e    = (random | 1) + v * more + (((random & 0xffffffffu) * more) >> 32);
        return ((64ll << 32) - lrs_log2(e)) >> (32 - LRS_Q);
    }
    const uint64_t e2 = (uint64_t) ((64ll << 32) - lrs_log2(~random | 1)); // in units of ln 2
    return ((32ll << 32) + 2271034279ll - lrs_log2(e2)) >> (32 - LRS_Q);
}

// The draw takes the highest of these. Above 0 and below 2^32.
LRS_FN uint32_t lrs_score(uint32_t distance, uint64_t random) { return (uint32_t) (lrs_gumbel(random) - (int64_t) distance + (72ll << LRS_Q)); }

// A bound: tokens with the best score have at most this high half of a random number.
LRS_FN uint32_t lrs_high_bound(uint32_t distance, uint32_t best_score) {
    // gumbel <= -log2(v), so that v <= 2^-(best_score - 72 + distance)
    const int64_t least = (int64_t) best_score + distance - (72ll << LRS_Q) - 64; // 64: more than the errors
    if (least <= 0) { return 0xffffffffu; }
    const int64_t bits = least >> LRS_Q; // rounded down
    return bits >= 32 ? 0 : 0xffffffffu >> bits;
}

// --- a row's request and result ----------------------------------------------------------------------------------

enum llama_row_status : int32_t {
    LLAMA_ROW_OK = 0,
    LLAMA_ROW_NOT_FINITE, // a logit is NaN or infinite
    LLAMA_ROW_ZERO,       // all logits are 0
    LLAMA_ROW_NONE_LEFT,  // rules and mask leave no token
    LLAMA_ROW_MISSING,    // the row was not kept
};

enum { LLAMA_ROW_SEEN = 1, LLAMA_ROW_SEEN_WITHIN = 2, LLAMA_ROW_BANNED = 4 };

#define LLAMA_ROW_MAX_TOP 20

#define LLAMA_ROW_UNCHECKED (-2) // n_top of a row that may have logits that are not finite: a draft of some of the tokens

// What a request's rules and penalties change in its row; one edit a token.
struct llama_row_edit {
    int32_t  token;
    uint32_t flags;
    float    add;  // logit_bias; a kernel keeps the model's logit here
    float    less; // presence and frequency penalties
};

struct llama_row_request {
    llama_row_params params;
    uint64_t         position; // tokens of the answer before this one
    llama_row_edit * edits;
    const uint32_t * mask; // a bit for each token of the vocabulary that may be chosen; NULL: all
    int32_t          n_edits;
    float            repetition[2]; // for LLAMA_ROW_SEEN, and after it for LLAMA_ROW_SEEN_WITHIN
    int32_t          n_top;         // likeliest tokens to return with log-probabilities; negative: none at all
    int32_t          scored;        // a token to take instead of a choice, or -1
};

struct llama_row_result {
    int32_t  status;
    int32_t  token; // -1 without LLAMA_ROW_OK
    int32_t  rank;  // 1 for the likeliest token; of equally likely ones the lowest id comes first
    int32_t  n_top;
    float    logit;    // of the token, as the model computed it
    float    best;     // of the likeliest token
    int32_t  surprise; // of the token among those that Mirostat left, Q24
    int32_t  unused;
    uint64_t mass; // of the whole row, padding included, in 2^-44 of the likeliest token's
    int32_t  top[LLAMA_ROW_MAX_TOP];
    float    top_logits[LLAMA_ROW_MAX_TOP];
};

// A launch for rows that lie on a device. `upload` bytes go from `from` to `to` first, where the requests are.
struct llama_row_launch {
    float *                   logits; // [n_rows][n_vocab]: as before when the launch ends
    int32_t                   n_rows, n_vocab, n_real;
    const int32_t *           which; // [n_rows] each row's request, or -1 for none; copied
    const void *              from;
    void *                    to;
    size_t                    upload;
    const llama_row_request * requests; // on the device
    llama_row_result *        results;  // where the device can write, by request
    int32_t *                 tokens;   // on the device, by row, or NULL
    int32_t *                 asked;    // on the device, by request, or NULL
    void *                    scratch;  // on the device, LLAMA_ROW_SCRATCH bytes: 0 before the first launch
};

#define LLAMA_ROW_MOST    64   // rows that are sampled together
#define LLAMA_ROW_QUEUED  1024 // rows whose tokens other passes may read
#define LLAMA_ROW_SCRATCH (LLAMA_ROW_MOST * (210 << 10))

// Begins the launch behind what the backend computes, or with NULL waits for the last one. Found by the name
// "ggml_backend_cuda_sample_rows" in the backend's registry. Returns false if the device cannot.
typedef bool (*llama_row_launch_t)(struct ggml_backend * backend, const llama_row_launch * launch);

LRS_FN float lrs_edited(const llama_row_edit & e, const float * repetition, float logit) {
    if (e.flags & LLAMA_ROW_BANNED) { return lrs_logit(0x007fffffu); }
    logit = lrs_penalise(logit + e.add, e.flags & LLAMA_ROW_SEEN, repetition[0], e.less);
    return lrs_penalise(logit, e.flags & LLAMA_ROW_SEEN_WITHIN, repetition[1], 0);
}
