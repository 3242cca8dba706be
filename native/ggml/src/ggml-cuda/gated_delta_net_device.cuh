#pragma once

#include "gated_delta_net_chunked.cuh"
#include "norm-fused-device.cuh"

// Parts of the kernels of the delta net.

#define GDN_HEAD_SIZE 128

static __device__ __forceinline__ float dot(const float4 a, const float4 b, const float c) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, c))));
}

// Half a warp has the row of 128 elements, a thread elements 4*lane .. and 64 + 4*lane .. of it. The sum is that of rms_norm_scale_pair_f32.
static __device__ __forceinline__ void rms_norm_scale_half(float4 v[2], const float eps, const float factor) {
    const float scale = rsqrtf(warp_reduce_sum<16>(sum_of_squares(v[0]) + sum_of_squares(v[1])) / GDN_HEAD_SIZE + eps);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        v[i] = make_float4(factor * (scale * v[i].x), factor * (scale * v[i].y), factor * (scale * v[i].z), factor * (scale * v[i].w));
    }
}

// What a token does to n_cols columns of the state, of which half a warp has S[i][col] as s, with g = exp(g):
// delta = (v - g*sum_i s*k)*beta, s = g*s + k*delta
template <int n_cols>
static __device__ __forceinline__ void delta_net_token(
        float4 (&s)[n_cols][2], float (&delta)[n_cols], const float4 (&k)[2], const float g, const float beta) {
#pragma unroll
    for (int c = 0; c < n_cols; ++c) {
        const float sk = warp_reduce_sum<16>(dot(s[c][1], k[1], dot(s[c][0], k[0], 0.0f)));
        delta[c]       = fmaf(-g, sk, delta[c]) * beta;
    }
#pragma unroll
    for (int c = 0; c < n_cols; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            s[c][i].x = fmaf(g, s[c][i].x, k[i].x * delta[c]);
            s[c][i].y = fmaf(g, s[c][i].y, k[i].y * delta[c]);
            s[c][i].z = fmaf(g, s[c][i].z, k[i].z * delta[c]);
            s[c][i].w = fmaf(g, s[c][i].w, k[i].w * delta[c]);
        }
    }
}

static __device__ __forceinline__ float round_to_f16(const float x) { return __half2float(__float2half_rn(x)); }

static __device__ __forceinline__ float4 round_to_f16(const float4 v) {
    return make_float4(round_to_f16(v.x), round_to_f16(v.y), round_to_f16(v.z), round_to_f16(v.w));
}

template <int n_cols>
static __device__ __forceinline__ void round_states(float4 (&s)[n_cols][2]) {
#pragma unroll
    for (int c = 0; c < n_cols; ++c) {
        s[c][0] = round_to_f16(s[c][0]);
        s[c][1] = round_to_f16(s[c][1]);
    }
}

// Element i of the states.
static __device__ __forceinline__ float load_state_one(const void * states, const bool f16, const int64_t i) {
    return f16 ? __half2float(((const half *) states)[i]) : ((const float *) states)[i];
}

static __device__ __forceinline__ void store_state_one(void * states, const ggml_cuda_gdn_types types, const int64_t i, const float v) {
    if (types.to_f16) {
        ((half *) states)[i] = __float2half_rn(v);
    } else {
        ((float *) states)[i] = types.rounded ? round_to_f16(v) : v;
    }
}

// Elements i and i + 1.
static __device__ __forceinline__ float2 load_state_two(const void * states, const bool f16, const int64_t i) {
    return f16 ? __half22float2(*(const half2 *) ((const half *) states + i)) : *(const float2 *) ((const float *) states + i);
}

static __device__ __forceinline__ void store_state_two(void * states, const ggml_cuda_gdn_types types, const int64_t i, const float2 v) {
    if (types.to_f16) {
        *(half2 *) ((half *) states + i) = __floats2half2_rn(v.x, v.y);
    } else {
        *(float2 *) ((float *) states + i) = types.rounded ? make_float2(round_to_f16(v.x), round_to_f16(v.y)) : v;
    }
}

// Elements i to i + 3.
static __device__ __forceinline__ float4 load_state(const void * states, const bool f16, const int64_t i) {
    if (!f16) { return *(const float4 *) ((const float *) states + i); }
    const uint2  raw = *(const uint2 *) ((const half *) states + i);
    const float2 a   = __half22float2(*(const half2 *) &raw.x);
    const float2 b   = __half22float2(*(const half2 *) &raw.y);
    return make_float4(a.x, a.y, b.x, b.y);
}

static __device__ __forceinline__ void store_state(void * states, const bool f16, const int64_t i, const float4 v) {
    if (!f16) {
        *(float4 *) ((float *) states + i) = v;
        return;
    }
    const half2 h[2]                 = { __floats2half2_rn(v.x, v.y), __floats2half2_rn(v.z, v.w) };
    *(uint2 *) ((half *) states + i) = *(const uint2 *) h;
}
