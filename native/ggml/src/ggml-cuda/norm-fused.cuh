#pragma once

#include "common.cuh"

// Chains of a norm or a gate and what stands around it, each as one kernel. A row's result does not depend on the number of rows.

// Where such a kernel also puts its result as the product behind it reads its columns, so that nothing has to quantize or convert them.
struct ggml_cuda_columns_out {
    void *                     data   = nullptr;                 // nullptr: nowhere
    ggml_cuda_quantized_layout layout = GGML_CUDA_QUANTIZED_F16; // or F16_MMA, BF16, Q8_1, MMQ_D4, MMQ_DS4
    int                        ne0    = 0;                       // elements of a column, a multiple of MATRIX_ROW_PADDING
    int                        ne1    = 0;
    bool                       only   = false; // nothing else reads the result
};

// Tiles of 8 columns in GGML_CUDA_QUANTIZED_F16_MMA
static __host__ __device__ __forceinline__ int ggml_cuda_columns_mma_tiles(const int ncols) {
    return ncols <= 8 ? 1 : ncols <= 16 ? 2 : ncols <= 32 ? 4 : 8;
}

// sum = a + b, y = rms_norm(sum)*w. All are contiguous rows of w->ne[0] elements, b and a may be in either order.
bool ggml_cuda_can_add_rms_norm(const ggml_tensor * add, const ggml_tensor * norm, const ggml_tensor * mul);
void ggml_cuda_op_add_rms_norm(
        ggml_backend_cuda_context & ctx, ggml_tensor * add, const ggml_tensor * norm, ggml_tensor * mul, ggml_cuda_columns_out columns);

// sum = a + sigmoid(gate)*x, add = sum + b, y = rms_norm(add)*w: what a gated shared expert adds to the others, with a gate for each row
bool ggml_cuda_can_gated_add_rms_norm(const ggml_tensor * sigmoid, const ggml_tensor * gated, const ggml_tensor * sum, const ggml_tensor * add,
        const ggml_tensor * norm, const ggml_tensor * mul);
void ggml_cuda_op_gated_add_rms_norm(ggml_backend_cuda_context & ctx, const ggml_tensor * sigmoid, const ggml_tensor * gated, const ggml_tensor * sum,
        ggml_tensor * add, const ggml_tensor * norm, ggml_tensor * mul, ggml_cuda_columns_out columns);

// y = rms_norm(x)*w, for columns that are wanted
bool ggml_cuda_can_rms_norm_columns(const ggml_tensor * norm, const ggml_tensor * mul);
void ggml_cuda_op_rms_norm_columns(ggml_backend_cuda_context & ctx, const ggml_tensor * norm, ggml_tensor * mul, ggml_cuda_columns_out columns);

// y = rms_norm(x)*w*silu(z), the gated norm after a delta net
bool ggml_cuda_can_rms_norm_gated(const ggml_tensor * norm, const ggml_tensor * mul, const ggml_tensor * silu, const ggml_tensor * gated);
void ggml_cuda_op_rms_norm_gated(ggml_backend_cuda_context & ctx, const ggml_tensor * norm, const ggml_tensor * mul, const ggml_tensor * silu,
        ggml_tensor * gated, ggml_cuda_columns_out columns);

// y = rms_norm(x)*scale for two tensors of one shape, the queries and keys of a delta net
bool ggml_cuda_can_rms_norm_scale_pair(const ggml_tensor * norm0, const ggml_tensor * scale0, const ggml_tensor * norm1, const ggml_tensor * scale1);
void ggml_cuda_op_rms_norm_scale_pair(
        ggml_backend_cuda_context & ctx, const ggml_tensor * norm0, ggml_tensor * scale0, const ggml_tensor * norm1, ggml_tensor * scale1);

// beta = sigmoid(b), g = softplus(a + bias)*c, what gates a delta net
bool ggml_cuda_can_delta_net_gates(const ggml_tensor * sigmoid, const ggml_tensor * add, const ggml_tensor * softplus, const ggml_tensor * mul);
void ggml_cuda_op_delta_net_gates(
        ggml_backend_cuda_context & ctx, ggml_tensor * sigmoid, const ggml_tensor * add, const ggml_tensor * softplus, ggml_tensor * mul);

// y = silu(gate)*up, for columns that are wanted
bool ggml_cuda_can_swiglu_columns(const ggml_tensor * glu);
void ggml_cuda_op_swiglu_columns(ggml_backend_cuda_context & ctx, ggml_tensor * glu, ggml_cuda_columns_out columns);

// columns = silu(gate)*up, all n elements in FP16, a multiple of 8
void ggml_cuda_op_swiglu_f16(ggml_backend_cuda_context & ctx, const half * gate, const half * up, int64_t n, ggml_cuda_columns_out columns);

// y = sigmoid(gate)*x, for columns that are wanted. The gate is what the sigmoid reads, or what was copied for it: rows of one stride
bool ggml_cuda_can_sigmoid_mul_columns(const ggml_tensor * gate, const ggml_tensor * sigmoid, const ggml_tensor * mul);
void ggml_cuda_op_sigmoid_mul_columns(
        ggml_backend_cuda_context & ctx, const ggml_tensor * gate, const ggml_tensor * sigmoid, ggml_tensor * mul, ggml_cuda_columns_out columns);
