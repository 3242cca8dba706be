#pragma once

#include "common.cuh"

#define GROUPED_MAX_EXPERTS 1024

// A pair is one of the experts of a token: token*n_used + index of the expert.
struct grouped_args {
    const void *  w;
    const void *  w_gate;
    int64_t       sw_row, sw_expert;
    const float * y;
    int64_t       sy_channel, sy_token;
    const int *   ids;
    int64_t       si_token;
    float *       dst;
    int64_t       sd_channel, sd_token;
    int           k, rows, n_tokens, n_used, n_channels, n_experts;
};

struct grouped_plan {
    int *  n_tiles;
    int4 * tiles; // expert, first pair, pairs
    int *  pairs; // sorted by expert
    void * y;     // n_tokens*n_channels rows of k
};

// Sorts pairs by expert into tiles of up to tile_cols of one expert, and converts y. args.w, args.dst and their strides are not read.
void ggml_cuda_grouped_sort_f16(ggml_backend_cuda_context & ctx, const grouped_args & args, const grouped_plan & plan, int tile_cols);

// MUL_MAT_ID of F16 and BF16 experts with tensor cores, the tiles of all experts in one launch. The device sorts the rows, so that
//     nothing waits for the host. A row of dst has the same bits whatever the other rows are.
// With gate, experts of the same shape as src0, dst = silu(gate*src1) * (src0*src1).
void ggml_cuda_mul_mat_f_grouped(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * gate, const ggml_tensor * src1,
        const ggml_tensor * ids, ggml_tensor * dst);

// dst is the product, not what a gate makes of it
bool ggml_cuda_should_use_mmf_grouped(const ggml_tensor * dst, int cc);
