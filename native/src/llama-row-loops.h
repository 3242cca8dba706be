// Loops over a whole row, which compilers turn into vector code.
#pragma once

#include "llama-row-state.h"

// the hot loops, for newer processors too: libllama is compiled for the oldest
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define LLAMA_ROW_HOT __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define LLAMA_ROW_HOT
#endif

struct row_scan {
    bool unusable, zeros;
};

LLAMA_ROW_HOT static row_scan scan(const float * logits, int32_t n) {
    uint32_t bad = 0, some = 0;
    for (int32_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, logits + i, 4);
        bad |= (bits & 0x7f800000u) == 0x7f800000u;
        some |= bits << 1;
    }
    return { bad != 0, some == 0 };
}

LLAMA_ROW_HOT static float highest(const float * logits, int32_t n) {
    float lanes[16];
    std::fill(lanes, lanes + 16, NONE);
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        for (int j = 0; j < 16; j++) { lanes[j] = logits[i + j] > lanes[j] ? logits[i + j] : lanes[j]; }
    }
    float best = NONE;
    for (; i < n; i++) { best = std::max(best, logits[i]); }
    for (float lane : lanes) { best = std::max(best, lane); }
    return best;
}

// The tokens of a row with logits from `low` to `high`, and how far they are from the best.
struct row_part {
    const float * logits;
    int32_t       n;
    float         low, high; // both included
    float         scale;

    uint32_t distance(int32_t i) const { return logits[i] >= low && logits[i] <= high ? lrs_distance(logits[i], high, scale) : LRS_FAR; }
};

LLAMA_ROW_HOT static uint64_t total_mass(row_part part) {
    uint64_t sum = 0;
    for (int32_t i = 0; i < part.n; i++) { sum += lrs_mass(part.distance(i)); }
    return sum;
}

LLAMA_ROW_HOT static int32_t total_count(row_part part) {
    int32_t n = 0;
    for (int32_t i = 0; i < part.n; i++) { n += part.logits[i] >= part.low && part.logits[i] <= part.high; }
    return n;
}

LLAMA_ROW_HOT static uint64_t total_moments(row_part part) {
    uint64_t sum = 0;
    for (int32_t i = 0; i < part.n; i++) {
        const uint32_t far = part.distance(i);
        sum += lrs_moment(far, lrs_mass(far));
    }
    return sum;
}

struct row_sums {
    uint64_t n = 0, sum = 0, squares = 0;
};

LLAMA_ROW_HOT static row_sums sums_below(row_part part) {
    row_sums all;
    for (int32_t i = 0; i < part.n; i++) {
        const bool     kept  = part.logits[i] >= part.low && part.logits[i] <= part.high;
        const uint64_t below = kept ? lrs_below(part.logits[i], part.high) : 0;
        all.n += kept;
        all.sum += below;
        all.squares += below * below;
    }
    return all;
}

LLAMA_ROW_HOT static void weigh_block(row_part part, int32_t first, int32_t n, uint32_t * far, uint64_t * mass) {
    for (int32_t i = 0; i < n; i++) {
        far[i]  = part.distance(first + i);
        mass[i] = lrs_mass(far[i]);
    }
}

static const int32_t BLOCK = 256;

LLAMA_ROW_HOT static void noise_block(row_part part, int32_t first, uint64_t seed, uint32_t * high, uint32_t * far) {
    for (int32_t i = 0; i < BLOCK; i++) {
        high[i] = lrs_random(seed, first + i);
        far[i]  = part.distance(first + i);
    }
}

LLAMA_ROW_HOT static bool any_in_bounds(const uint32_t * high, const uint32_t * far, uint32_t score) {
    uint32_t      some = 0;
    const int32_t base = (int32_t) (score >> 8) - (72 << (LRS_Q - 8)) - 2; // in 1/65536, rounded down
    for (int32_t i = 0; i < BLOCK; i++) {
        const int32_t least = base + (int32_t) (far[i] >> 8);
        const int32_t bits  = least < 0 ? 0 : least >> (LRS_Q - 8);
        some |= far[i] <= LRS_LAST && high[i] <= (bits > 31 ? 0u : 0xffffffffu >> bits);
    }
    return some != 0;
}
