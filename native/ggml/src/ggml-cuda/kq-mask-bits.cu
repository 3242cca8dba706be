#include "kq-mask-bits.cuh"

// a thread has the values of a byte

static __global__ void kq_mask_of_bits(const uint8_t * bits, uint4 * dst, const int64_t n) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;

    ggml_cuda_pdl_sync();
    if (i >= n) { return; }

    const uint32_t drop = ~uint32_t(bits[i]);
    uint32_t       h2[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) { h2[k] = (drop >> (2 * k) & 1) * 0x0000FC00u | (drop >> (2 * k + 1) & 1) * 0xFC000000u; }
    dst[i] = make_uint4(h2[0], h2[1], h2[2], h2[3]);
}

static __global__ void kq_mask_of_bits(const uint8_t * bits, float4 * dst, const int64_t n) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;

    ggml_cuda_pdl_sync();
    if (i >= n) { return; }

    const uint32_t keep = bits[i];
    float          f[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) { f[k] = keep >> k & 1 ? 0.0f : -INFINITY; }
    dst[2 * i + 0] = make_float4(f[0], f[1], f[2], f[3]);
    dst[2 * i + 1] = make_float4(f[4], f[5], f[6], f[7]);
}

void ggml_cuda_op_kq_mask_of_bits(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    constexpr int threads = 256;
    const int64_t n       = ggml_nelements(dst) / 8;
    const auto    params  = ggml_cuda_kernel_launch_params(dim3((n + threads - 1) / threads), dim3(threads), 0, ctx.stream());
    const auto *  bits    = (const uint8_t *) dst->src[0]->data;

    if (dst->type == GGML_TYPE_F16) {
        ggml_cuda_kernel_launch(
                static_cast<void (*)(const uint8_t *, uint4 *, const int64_t)>(kq_mask_of_bits), params, bits, (uint4 *) dst->data, n);
    } else {
        ggml_cuda_kernel_launch(
                static_cast<void (*)(const uint8_t *, float4 *, const int64_t)>(kq_mask_of_bits), params, bits, (float4 *) dst->data, n);
    }
}
