#pragma once

#include "norm-fused.cuh"
#include "mmq.cuh"

// Parts of the kernels of norm-fused.cu that others have, too.

static __device__ __forceinline__ float silu(const float x) { return x / (1.0f + expf(-x)); }

static __device__ __forceinline__ float sum_of_squares(const float4 v) { return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, v.x * v.x))); }

// GGML_CUDA_QUANTIZED_F16_MMA: 32 elements of 8 columns are 512 bytes, [K/32][tiles of 8 columns][8 columns][4][8 elements]. Behind all of them
//     are the sums of 32 elements of a column, divided by 32, in FP16: [K/256][tiles][8 columns][4][high parts of two sums, low parts].
//     Columns that fill up a tile are not written.
static __device__ __forceinline__ void store_columns_mma(const ggml_cuda_columns_out columns, const int64_t i, const float4 v) {
    const int      ntiles = ggml_cuda_columns_mma_tiles(columns.ne1);
    const uint32_t col    = (uint32_t) i / (columns.ne0 / 4);
    const uint32_t i0     = (uint32_t) i % (columns.ne0 / 4);

    half2 h[2] = { __floats2half2_rn(v.x, v.y), __floats2half2_rn(v.z, v.w) };
    ((uint2 *) columns.data)[((i0 / 8 * ntiles + col / 8) * 32 + col % 8 * 4 + i0 % 8 / 2) * 2 + i0 % 2] = *(const uint2 *) h;

    float sum = (__low2float(h[0]) + __high2float(h[0])) + (__low2float(h[1]) + __high2float(h[1]));
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2) { sum += __shfl_xor_sync(0xffffffff, sum, offset, WARP_SIZE); }
    if (i0 % 8 == 0) {
        sum *= 1.0f / 32;
        const half high = __float2half_rn(sum);
        half *     sums = (half *) columns.data + (int64_t) columns.ne0 * ntiles * 8 +
                          ((i0 / 64 * ntiles + col / 8) * 32 + col % 8 * 4 + i0 / 16 % 4) * 4 + i0 / 8 % 2;
        sums[0]         = high;
        sums[2]         = __float2half_rn(sum - __half2float(high));
    }
}

// Elements 4*i .. 4*i + 3 of all columns, in a warp of which each thread has the ones behind those of the thread before. The same bits
//     as quantize_row_q8_1_cuda and quantize_mmq_q8_1_cuda give, but for the order of sums in Q8_1.
static __device__ __forceinline__ void store_columns(const ggml_cuda_columns_out columns, const int64_t i, const float4 v) {
    if (columns.data == nullptr) { return; }
    if (columns.layout == GGML_CUDA_QUANTIZED_F16) {
        half2 h[2]                  = { __floats2half2_rn(v.x, v.y), __floats2half2_rn(v.z, v.w) };
        ((uint2 *) columns.data)[i] = *(const uint2 *) h;
        return;
    }
    if (columns.layout == GGML_CUDA_QUANTIZED_BF16) {
        nv_bfloat162 h[2]           = { __floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w) };
        ((uint2 *) columns.data)[i] = *(const uint2 *) h;
        return;
    }
    if (columns.layout == GGML_CUDA_QUANTIZED_F16_MMA) {
        store_columns_mma(columns, i, v);
        return;
    }
    // 8 threads have a block of 32 elements
    float amax      = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    amax            = warp_reduce_max<8>(amax);
    const float sum = warp_reduce_sum<8>(v.x + v.y + v.z + v.w);

    if (columns.layout == GGML_CUDA_QUANTIZED_Q8_1) {
        const float  d = amax / 127.0f;
        block_q8_1 * y = (block_q8_1 *) columns.data + i / 8;
        char4        q = make_char4(0, 0, 0, 0);
        if (amax != 0.0f) { q = make_char4(roundf(v.x / d), roundf(v.y / d), roundf(v.z / d), roundf(v.w / d)); }
        ((char4 *) y->qs)[i % 8] = q;
        if (i % 8 == 0) { y->ds = make_half2(d, sum); }
        return;
    }
    const uint32_t   col       = (uint32_t) i / (columns.ne0 / 4);
    const uint32_t   i0        = (uint32_t) i % (columns.ne0 / 4);
    const float      d_inv     = 127.0f / amax;
    block_q8_1_mmq * y         = (block_q8_1_mmq *) columns.data + (int64_t) (i0 / 32) * columns.ne1 + col;
    ((char4 *) y->qs)[i0 % 32] = make_char4(roundf(v.x * d_inv), roundf(v.y * d_inv), roundf(v.z * d_inv), roundf(v.w * d_inv));
    if (i0 % 8 == 0) {
        if (columns.layout == GGML_CUDA_QUANTIZED_MMQ_DS4) {
            y->ds4[(i0 % 32) / 8] = make_half2(1.0f / d_inv, sum);
        } else {
            y->d4[(i0 % 32) / 8] = 1.0f / d_inv;
        }
    }
}

static __device__ __forceinline__ float4 norm_gated(const float4 x, const float scale, const float4 w, const float4 z) {
    return make_float4(scale * x.x * w.x * silu(z.x), scale * x.y * w.y * silu(z.y), scale * x.z * w.z * silu(z.z), scale * x.w * w.w * silu(z.w));
}

static __device__ __forceinline__ float delta_net_beta(const float b) { return 1.0f / (1.0f + expf(-b)); }

static __device__ __forceinline__ float delta_net_gate(float a, const float bias, const float c) {
    a += bias;
    return (a > 20.0f ? a : logf(1.0f + expf(a))) * c;
}
