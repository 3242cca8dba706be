#pragma once

#include "common.cuh"

// MUL_MAT_ID of experts in Q4_K and Q6_K with tensor cores, the weights as FP16. With few tokens each expert that has some is read once, for
//     eight of them at a time, and a row of dst has the same bits whatever the other rows are. With many the device sorts the rows first.
// With gate, experts of the same shape as src0, both in Q4_K, dst = silu(gate*src1) * (src0*src1).
void ggml_cuda_mul_mat_q_grouped(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * gate, const ggml_tensor * src1,
        const ggml_tensor * ids, ggml_tensor * dst);

// dst is the product, not what a gate makes of it
bool ggml_cuda_should_use_mmq_grouped(const ggml_tensor * dst, int cc);

bool ggml_cuda_can_fuse_mmq_grouped(const ggml_tensor * up, const ggml_tensor * gate, const ggml_tensor * glu, int cc);

// Experts from gate and up to down, for Hopper: with few tokens for each as fast as their weights come. dst is down.
bool ggml_cuda_can_fuse_mmq_stream(const ggml_tensor * gate, const ggml_tensor * up, const ggml_tensor * glu, const ggml_tensor * down, int cc);

void ggml_cuda_mul_mat_q_stream(ggml_backend_cuda_context & ctx, const ggml_tensor * gate, const ggml_tensor * up, ggml_tensor * down);
