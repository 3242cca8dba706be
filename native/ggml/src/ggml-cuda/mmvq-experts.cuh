#pragma once

#include "common.cuh"

// Experts of few tokens, for Hopper: gate, up and SiLU in one kernel, down and the sum weighted by the router in another, with a gated shared
// expert as one expert more.

struct ggml_cuda_shared_expert {
    const ggml_tensor * gate;
    const ggml_tensor * up;
    const ggml_tensor * glu;
    const ggml_tensor * down;
    const ggml_tensor * weight; // before the sigmoid
};

bool ggml_cuda_can_fuse_mmvq_experts(const ggml_tensor * gate, const ggml_tensor * up, const ggml_tensor * glu, const ggml_tensor * down,
        const ggml_tensor * weights, const ggml_tensor * dst, int cc);

// x: the columns of the other experts
bool ggml_cuda_can_fuse_mmvq_shared_expert(const ggml_cuda_shared_expert & shared, const ggml_tensor * x, const ggml_tensor * dst);

// shared: nullptr if there is none. dst: the sum
void ggml_cuda_mul_mat_vec_q_experts(ggml_backend_cuda_context & ctx, const ggml_tensor * gate, const ggml_tensor * up, const ggml_tensor * down,
        const ggml_tensor * weights, const ggml_cuda_shared_expert * shared, ggml_tensor * dst);
