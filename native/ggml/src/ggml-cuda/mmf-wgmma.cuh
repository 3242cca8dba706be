#pragma once

#include "common.cuh"

// BF16 experts of many tokens from gate and up to the sum weighted by the router, where this was built for sm_90a and runs on it. Rows
//     between the products, and those that are summed, are BF16.
bool ggml_cuda_can_fuse_wgmma(const ggml_tensor * gate, const ggml_tensor * up, const ggml_tensor * glu, const ggml_tensor * down,
        const ggml_tensor * weights, const ggml_tensor * dst, int cc);

void ggml_cuda_mul_mat_f_wgmma(ggml_backend_cuda_context & ctx, const ggml_tensor * gate, const ggml_tensor * up, const ggml_tensor * down,
        const ggml_tensor * weights, ggml_tensor * dst);
