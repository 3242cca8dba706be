#pragma once

#include "gated_delta_net.cuh"
#include "gated_delta_net_chunked.cuh"
#include "gated_delta_net_fold.cuh"
#include "norm-fused.cuh"

// The delta net of few tokens, decode steps and verifications, alone or with the norms and gates that Qwen3.5 has around it.

// The most tokens of a sequence.
static inline int64_t ggml_cuda_gdn_n_most(const ggml_tensor * gdn) { return gdn->src[7] ? ggml_get_op_params_i32(gdn, 1) : gdn->src[2]->ne[2]; }

static inline ggml_cuda_gdn_types ggml_cuda_gdn_state_types(const ggml_tensor * gdn, const bool to_f16) {
    const bool from_f16 = gdn->src[5]->type == GGML_TYPE_F16;
    return { from_f16, to_f16, from_f16 || ggml_get_op_params_i32(gdn, 2) != 0, ggml_get_op_params_i32(gdn, 3) - 1 };
}

// Whether the kernels for a delta net take states in F16.
bool ggml_cuda_gdn_takes_f16(const ggml_tensor * gdn, int cc);

bool ggml_cuda_gated_delta_net_head_supported(const ggml_cuda_gdn_args & args, int64_t n_tokens, int cc);

// The tokens from t_first on, or of each sequence those that are no part of chunks. The last K states go to args.state and to state_rest, the
// newest first. A sequence's result does not depend on how many there are.
void ggml_cuda_gated_delta_net_head(
        const ggml_cuda_gdn_args & args, void * state_rest, int64_t state_slot_stride, int K, int64_t t_first, cudaStream_t stream);

// The operators of a chain, in their order. q_norm and k_norm are of raw queries and keys, gdn has the states' copies behind it.
struct ggml_cuda_gdn_chain_nodes {
    const ggml_tensor * sigmoid;
    const ggml_tensor * add;
    const ggml_tensor * softplus;
    const ggml_tensor * gate;
    const ggml_tensor * q_norm;
    const ggml_tensor * q_scale;
    const ggml_tensor * k_norm;
    const ggml_tensor * k_scale;
    const ggml_tensor * gdn;
    const ggml_tensor * norm;
    const ggml_tensor * mul;
    const ggml_tensor * silu;
    ggml_tensor *       gated;
};

bool ggml_cuda_can_gated_delta_net_chain(
        ggml_backend_cuda_context & ctx, const ggml_cuda_gdn_chain_nodes & nodes, const ggml_cuda_gated_delta_net_fused_cache & cache);
void ggml_cuda_op_gated_delta_net_chain(ggml_backend_cuda_context & ctx, const ggml_cuda_gdn_chain_nodes & nodes,
        const ggml_cuda_gated_delta_net_fused_cache & cache, const ggml_cuda_columns_out & columns);
