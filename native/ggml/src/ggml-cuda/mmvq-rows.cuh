#pragma once

#include "common.cuh"

// Products of a K-quantized matrix with one column, for Hopper.

bool ggml_cuda_mmvq_rows_on(); // unless GGML_CUDA_MMVQ_ROWS=0

bool ggml_cuda_should_use_mmvq_rows(
        int cc, const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * dst, const ggml_cuda_mm_fusion_args_device & fusion);

// y: the column in Q8_1
void ggml_cuda_mul_mat_vec_q_rows(
        ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const void * y, ggml_tensor * dst, const ggml_cuda_mm_fusion_args_device & fusion);
