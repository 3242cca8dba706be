#pragma once

#include "common.cuh"

// F16 and BF16 experts of many tokens from gate and up to down, where this was built for sm_90a and runs on it. dst is down.
bool ggml_cuda_can_fuse_wgmma(const ggml_tensor * gate, const ggml_tensor * up, const ggml_tensor * glu, const ggml_tensor * down, int cc);

void ggml_cuda_mul_mat_f_wgmma(ggml_backend_cuda_context & ctx, const ggml_tensor * gate, const ggml_tensor * up, ggml_tensor * down);
