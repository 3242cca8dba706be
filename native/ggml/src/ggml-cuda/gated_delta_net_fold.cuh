#pragma once

#include "common.cuh"

// Operands of verified tokens (llama_rs_operands) that are folded into states: convolution, norms, gates and delta net of a layer.

// The operators of a fold, in their order.
struct ggml_cuda_gdn_fold_nodes {
    const ggml_tensor * x; // get_rows() of what is kept
    const ggml_tensor * beta;
    const ggml_tensor * alpha;
    const ggml_tensor * conv; // ggml_ssm_conv_offsets()
    ggml_tensor *       conv_states;
    const ggml_tensor * sigmoid;
    const ggml_tensor * add;
    const ggml_tensor * softplus;
    const ggml_tensor * gate;
    const ggml_tensor * q_norm;
    const ggml_tensor * q_scale;
    const ggml_tensor * k_norm;
    const ggml_tensor * k_scale;
    const ggml_tensor * gdn; // ggml_gated_delta_net_offsets()
    ggml_tensor *       states;
};

bool ggml_cuda_can_gated_delta_net_fold(ggml_backend_cuda_context & ctx, const ggml_cuda_gdn_fold_nodes & nodes);

// The bits are those of the operators one by one.
void ggml_cuda_op_gated_delta_net_fold(ggml_backend_cuda_context & ctx, const ggml_cuda_gdn_fold_nodes & nodes);
