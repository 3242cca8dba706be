#include "mmq-repacked.cuh"
#include "norm-fused-device.cuh"
#include "bulk-copy.cuh"

// The unit is 16 rows x 256 weights, as large as the blocks that it is made of: scales, then the quants of the first 128 columns, then those
//     of the second. The units of 16 rows follow each other along K. In 32 columns, lane (g, t) = (lane/4, lane%4) of a warp owns columns
//     8*t to 8*t + 7 of rows g and g + 8, the A operands of two m16n8k16 products. K has the same order inside these 32 columns for the
//     columns of src1, so that a lane's B operands of two products are 16 bytes (GGML_CUDA_QUANTIZED_F16_MMA).
//
// Quants become FP16 by a mask: an integer q in the low bits is the subnormal q*2^-24. In Q4_K and Q5_K the product with the integer scale
//     (6 bits) is exact in FP16, so that the 256 products of a super-block add up in the tensor core and are multiplied with d (FP32) once.
//     Minimums are one more product with the sums of 32 elements of a column (FP16, high and low part). In Q6_K (q - 32)*scale is rounded to
//     11 bits where it exceeds 2048. Q8_0 multiplies the sum of each 32 products with its d in FP32.
//
// A block (16 rows for each warp) takes the same number of super-blocks, in the order of rows, then K. Where several blocks share rows, the
//     last one to finish adds their parts in the order of K. Nothing of this depends on the number of columns.

static constexpr __host__ __device__ int mmq_repacked_meta(const ggml_type type) { return type == GGML_TYPE_Q6_K ? 288 : 256; }

static constexpr __host__ __device__ int mmq_repacked_half(const ggml_type type) {
    return type == GGML_TYPE_Q4_K ? 1024 : type == GGML_TYPE_Q5_K ? 1280 : type == GGML_TYPE_Q6_K ? 1536 : 2048;
}

static constexpr __host__ __device__ int mmq_repacked_unit(const ggml_type type) { return mmq_repacked_meta(type) + 2 * mmq_repacked_half(type); }

static constexpr __host__ __device__ bool mmq_repacked_has_mins(const ggml_type type) { return type == GGML_TYPE_Q4_K || type == GGML_TYPE_Q5_K; }

// of 256 weights of a row
static constexpr __host__ __device__ int mmq_repacked_block(const ggml_type type) { return mmq_repacked_unit(type) / 16; }

// ---------------------------------------------------------------------------------------------------------------------------------------
// From blocks to units

// Weight k of 256 as an integer without sign: 4, 5 or 6 bits, or a byte (value + 128)
template <ggml_type type>
static __device__ __forceinline__ uint32_t mmq_block_quant(const uint8_t * b, const int k) {
    if constexpr (type == GGML_TYPE_Q4_K) {
        return (b[16 + k / 64 * 32 + k % 32] >> (k / 32 % 2 * 4)) & 15;
    } else if constexpr (type == GGML_TYPE_Q5_K) {
        return ((b[48 + k / 64 * 32 + k % 32] >> (k / 32 % 2 * 4)) & 15) | (((b[16 + k % 32] >> (k / 32)) & 1) << 4);
    } else if constexpr (type == GGML_TYPE_Q6_K) {
        const int j = k % 128 / 32;
        return ((b[k / 128 * 64 + j % 2 * 32 + k % 32] >> (j / 2 * 4)) & 15) | (((b[128 + k / 128 * 32 + k % 32] >> (2 * j)) & 3) << 4);
    } else {
        return b[k / 32 * 34 + 2 + k % 32] ^ 0x80;
    }
}

// Bit of the first element (e = 0) of pair p in row g + 8*r of the word with the high bits of Q6_K
static __device__ __forceinline__ int mmq_repacked_high_bit(const int r, const int p) {
    const int at[2][4] = {
        { 4, 8,  6, 10 },
        { 0, 12, 2, 14 }
    };
    return at[r][p];
}

// A block a unit, of 256 threads, each with 8 columns of two rows
template <ggml_type type>
static __global__ void mmq_repack(const uint8_t * blocks, uint8_t * units, const int nblocks_k) {
    constexpr int nb   = mmq_repacked_block(type);
    const int64_t tile = blockIdx.x / nblocks_k;
    const int     kb   = blockIdx.x % nblocks_k;
    const auto    row  = [&](const int r) { return blocks + ((tile * 16 + r) * nblocks_k + kb) * nb; };
    uint8_t *     u    = units + (int64_t) blockIdx.x * mmq_repacked_unit(type);

    if (threadIdx.x < 16) {
        const int       r = threadIdx.x;
        const uint8_t * b = row(r);
        if constexpr (mmq_repacked_has_mins(type)) {
            const uint8_t * s    = b + 4;
            uint32_t        w[4] = { 0, 0, 0, 0 };
            for (int j = 0; j < 8; ++j) {
                const uint32_t sc = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
                const uint32_t mn = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
                const int      e = j % 2, i = j / 2;
                w[i / 2] |= sc << (16 * e + i % 2 * 6);
                if (i < 2) {
                    w[2] |= mn << (16 * e + 6 * i);
                } else {
                    w[i - 2] |= (mn & 15) << (16 * e + 12);
                    w[2] |= (mn >> 4) << (16 * e + 12 + 2 * (i - 2));
                }
            }
            w[3]                    = b[0] | b[1] << 8 | b[2] << 16 | (uint32_t) b[3] << 24; // d, dmin
            *(uint4 *) (u + r * 16) = make_uint4(w[0], w[1], w[2], w[3]);
        } else if constexpr (type == GGML_TYPE_Q6_K) {
            for (int i = 0; i < 16; ++i) { u[r * 16 + i % 2 * 8 + i / 2] = b[192 + i] ^ 0x80; }
            u[256 + 2 * r]     = b[208];
            u[256 + 2 * r + 1] = b[209];
        } else {
            for (int j = 0; j < 8; ++j) {
                u[r * 16 + 2 * j]     = b[34 * j];
                u[r * 16 + 2 * j + 1] = b[34 * j + 1];
            }
        }
    }

    const int h = threadIdx.x / 128, b = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    uint32_t  words[4] = { 0, 0, 0, 0 }, high = 0;
    for (int r = 0; r < 2; ++r) {
        for (int i = 0; i < 8; ++i) {
            const int      p = i / 2, e = i % 2;
            const uint32_t q = mmq_block_quant<type>(row(lane / 4 + 8 * r), h * 128 + b * 32 + lane % 4 * 8 + i);
            if constexpr (type == GGML_TYPE_Q8_0) {
                words[2 * r + i / 4] |= q << (i % 4 * 8);
            } else {
                words[r] |= (q & 15) << (16 * e + 4 * p);
            }
            if constexpr (type == GGML_TYPE_Q5_K) {
                high |= (q >> 4) << (8 * e + 2 * p + r);
            } else if constexpr (type == GGML_TYPE_Q6_K) {
                high |= (q >> 4) << (16 * e + mmq_repacked_high_bit(r, p));
            }
        }
    }
    uint8_t * quants = u + mmq_repacked_meta(type) + h * mmq_repacked_half(type);
    if constexpr (type == GGML_TYPE_Q8_0) {
        *(uint4 *) (quants + b * 512 + lane * 16) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
        *(uint2 *) (quants + b / 2 * 512 + lane * 16 + b % 2 * 8) = make_uint2(words[0], words[1]);
    }
    if constexpr (type == GGML_TYPE_Q5_K) {
        *(uint16_t *) (quants + 1024 + lane * 8 + b * 2) = high;
    } else if constexpr (type == GGML_TYPE_Q6_K) {
        *(uint32_t *) (quants + 1024 + lane * 16 + b * 4) = high;
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// From units to blocks and values

static __device__ __forceinline__ uint32_t mmq_repacked_u32(half2 x) { return *(uint32_t *) &x; }

static __device__ __forceinline__ half2 mmq_repacked_half2(uint32_t x) { return *(half2 *) &x; }

// Of row lane/4 + 8*r the 8 weights of 32 columns b of half h that this lane has, as in mmq_block_quant, pairs of them 16 bits apart
template <ggml_type type>
static __device__ __forceinline__ void mmq_unit_pairs(uint32_t (&q)[4], const uint8_t * u, const int h, const int b, const int lane, const int r) {
    const uint8_t * quants = u + mmq_repacked_meta(type) + h * mmq_repacked_half(type);
    if constexpr (type == GGML_TYPE_Q8_0) {
        const uint2 w = *(const uint2 *) (quants + b * 512 + lane * 16 + r * 8);
        q[0]          = (w.x & 0xff) | (w.x & 0xff00) << 8;
        q[1]          = ((w.x >> 16) & 0xff) | (w.x >> 24) << 16;
        q[2]          = (w.y & 0xff) | (w.y & 0xff00) << 8;
        q[3]          = ((w.y >> 16) & 0xff) | (w.y >> 24) << 16;
        return;
    }
    const uint32_t w    = *(const uint32_t *) (quants + b / 2 * 512 + lane * 16 + b % 2 * 8 + r * 4);
    uint32_t       high = 0;
    if constexpr (type == GGML_TYPE_Q5_K) {
        high = *(const uint16_t *) (quants + 1024 + lane * 8 + b * 2);
        high = (high & 0xff) | (high & 0xff00) << 8;
    } else if constexpr (type == GGML_TYPE_Q6_K) {
        high = *(const uint32_t *) (quants + 1024 + lane * 16 + b * 4);
    }
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        q[p] = (w >> 4 * p) & 0x000f000f;
        if constexpr (type == GGML_TYPE_Q5_K) {
            q[p] |= ((high >> (2 * p + r)) & 0x00010001) << 4;
        } else if constexpr (type == GGML_TYPE_Q6_K) {
            q[p] |= ((high >> mmq_repacked_high_bit(r, p)) & 0x00030003) << 4;
        }
    }
}

// Scale and minimum of 32 weights j of row r in Q4_K and Q5_K, 6 bits each
static __device__ __forceinline__ uint32_t mmq_unit_scale(const uint8_t * u, const int r, const int j) {
    return (*(const uint32_t *) (u + r * 16 + j / 4 * 4) >> (j % 2 * 16 + j / 2 % 2 * 6)) & 63;
}

static __device__ __forceinline__ uint32_t mmq_unit_min(const uint8_t * u, const int r, const int j) {
    const uint32_t * w = (const uint32_t *) (u + r * 16);
    const int        e = j % 2, i = j / 2;
    return i < 2 ? (w[2] >> (16 * e + 6 * i)) & 63 : ((w[i - 2] >> (16 * e + 12)) & 15) | (((w[2] >> (16 * e + 12 + 2 * (i - 2))) & 3) << 4);
}

// What mmq_unit_pairs has, dequantized
template <ggml_type type>
static __device__ __forceinline__ void mmq_unit_values(float2 (&v)[4], const uint8_t * u, const int h, const int b, const int lane, const int r) {
    uint32_t q[4];
    mmq_unit_pairs<type>(q, u, h, b, lane, r);
    const int row = lane / 4 + 8 * r, j = h * 4 + b;
    float     d, m                      = 0.0f;
    if constexpr (mmq_repacked_has_mins(type)) {
        d = __half2float(((const half *) (u + row * 16))[6]) * mmq_unit_scale(u, row, j);
        m = __half2float(((const half *) (u + row * 16))[7]) * mmq_unit_min(u, row, j);
    } else if constexpr (type == GGML_TYPE_Q6_K) {
        d = __half2float(((const half *) (u + 256))[row]) * (u[row * 16 + lane % 4 / 2 * 8 + j] - 128);
    } else {
        d = __half2float(((const half *) (u + row * 16))[j]);
    }
    // -1024, and what quants without sign are too large
    const half2 bias = mmq_repacked_half2(type == GGML_TYPE_Q6_K ? 0xe420e420 : type == GGML_TYPE_Q8_0 ? 0xe480e480 : 0xe400e400);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const float2 f = __half22float2(__hadd2(mmq_repacked_half2(q[p] | 0x64006400), bias));
        v[p]           = make_float2(d * f.x - m, d * f.y - m);
    }
}

// 8 bytes from the lower bytes of pairs, at an even address
static __device__ __forceinline__ void mmq_store_pairs(uint8_t * dst, const uint32_t (&x)[4]) {
#pragma unroll
    for (int p = 0; p < 4; ++p) { ((uint16_t *) dst)[p] = (x[p] & 0xff) | (x[p] >> 16) << 8; }
}

// A block of 256 threads a unit, of which each has 8 columns of two rows
template <ggml_type type>
static __global__ void mmq_unpack(const uint8_t * units, uint8_t * blocks, const int nblocks_k) {
    constexpr int   nb   = mmq_repacked_block(type);
    const int64_t   tile = blockIdx.x / nblocks_k;
    const int       kb   = blockIdx.x % nblocks_k;
    const uint8_t * u    = units + (int64_t) blockIdx.x * mmq_repacked_unit(type);
    const auto      row  = [&](const int r) { return blocks + ((tile * 16 + r) * nblocks_k + kb) * nb; };

    const int h = threadIdx.x / 128, b = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        uint8_t * dst = row(lane / 4 + 8 * r);
        uint32_t  x[4], y[4];
        if constexpr (type == GGML_TYPE_Q8_0) {
            mmq_unit_pairs<type>(x, u, h, b, lane, r);
            for (int p = 0; p < 4; ++p) { x[p] ^= 0x00800080; }
            mmq_store_pairs(dst + (h * 4 + b) * 34 + 2 + lane % 4 * 8, x);
        } else {
            // 4 bits of 32 columns, and above them those of others
            const bool is_low = type == GGML_TYPE_Q6_K ? b < 2 : b % 2 == 0;
            if (is_low) {
                mmq_unit_pairs<type>(x, u, h, b, lane, r);
                mmq_unit_pairs<type>(y, u, h, b + (type == GGML_TYPE_Q6_K ? 2 : 1), lane, r);
                for (int p = 0; p < 4; ++p) { x[p] = (x[p] & 0x000f000f) | (y[p] & 0x000f000f) << 4; }
                const int at = type == GGML_TYPE_Q6_K ? h * 64 + b * 32 : (type == GGML_TYPE_Q5_K ? 48 : 16) + h * 64 + b / 2 * 32;
                mmq_store_pairs(dst + at + lane % 4 * 8, x);
            } else if (type == GGML_TYPE_Q6_K && b == 2 + r) { // the other 2 bits of 128 columns
                x[0] = x[1] = x[2] = x[3] = 0;
                for (int j = 0; j < 4; ++j) {
                    mmq_unit_pairs<type>(y, u, h, j, lane, r);
                    for (int p = 0; p < 4; ++p) { x[p] |= ((y[p] >> 4) & 0x00030003) << (2 * j); }
                }
                mmq_store_pairs(dst + 128 + h * 32 + lane % 4 * 8, x);
            } else if (type == GGML_TYPE_Q5_K && h == 0 && b == 1 + 2 * r) { // the fifth bit of 256 columns
                x[0] = x[1] = x[2] = x[3] = 0;
                for (int j = 0; j < 8; ++j) {
                    mmq_unit_pairs<type>(y, u, j / 4, j % 4, lane, r);
                    for (int p = 0; p < 4; ++p) { x[p] |= ((y[p] >> 4) & 0x00010001) << j; }
                }
                mmq_store_pairs(dst + 16 + lane % 4 * 8, x);
            }
        }
    }

    if (threadIdx.x < 16) {
        const int r   = threadIdx.x;
        uint8_t * dst = row(r);
        if constexpr (mmq_repacked_has_mins(type)) {
            *(uint32_t *) dst = ((const uint32_t *) (u + r * 16))[3]; // d, dmin
            for (int i = 0; i < 4; ++i) {
                dst[4 + i]  = mmq_unit_scale(u, r, i) | (mmq_unit_scale(u, r, i + 4) >> 4) << 6;
                dst[8 + i]  = mmq_unit_min(u, r, i) | (mmq_unit_min(u, r, i + 4) >> 4) << 6;
                dst[12 + i] = (mmq_unit_scale(u, r, i + 4) & 15) | (mmq_unit_min(u, r, i + 4) & 15) << 4;
            }
        } else if constexpr (type == GGML_TYPE_Q6_K) {
            for (int i = 0; i < 16; ++i) { dst[192 + i] = u[r * 16 + i % 2 * 8 + i / 2] ^ 0x80; }
            *(uint16_t *) (dst + 208) = ((const uint16_t *) (u + 256))[r];
        } else {
            for (int j = 0; j < 8; ++j) { *(uint16_t *) (dst + 34 * j) = ((const uint16_t *) (u + r * 16))[j]; }
        }
    }
}

// The same threads
template <ggml_type type>
static __global__ void mmq_units_to_fp16(const uint8_t * units, half * y, const int nblocks_k) {
    const int64_t tile = blockIdx.x / nblocks_k;
    const int     kb   = blockIdx.x % nblocks_k;
    const int     h = threadIdx.x / 128, b = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float2 v[4];
        mmq_unit_values<type>(v, units + (int64_t) blockIdx.x * mmq_repacked_unit(type), h, b, lane, r);
        uint4 w;
        w.x = mmq_repacked_u32(__floats2half2_rn(v[0].x, v[0].y));
        w.y = mmq_repacked_u32(__floats2half2_rn(v[1].x, v[1].y));
        w.z = mmq_repacked_u32(__floats2half2_rn(v[2].x, v[2].y));
        w.w = mmq_repacked_u32(__floats2half2_rn(v[3].x, v[3].y));
        *(uint4 *) (y + ((tile * 16 + lane / 4 + 8 * r) * nblocks_k + kb) * 256 + h * 128 + b * 32 + lane % 4 * 8) = w;
    }
}

// A block of 32 threads has 256 elements of a row
template <ggml_type type>
static __global__ void mmq_unit_get_rows(const uint8_t * units, const int32_t * rows, float * dst, const int nblocks_k, const int64_t stride_dst) {
    const int       row = rows[blockIdx.x], r = row % 16;
    const uint8_t * u = units + ((int64_t) (row / 16) * nblocks_k + blockIdx.y) * mmq_repacked_unit(type);
    float2          v[4];
    mmq_unit_values<type>(v, u, threadIdx.x / 16, threadIdx.x / 4 % 4, r % 8 * 4 + threadIdx.x % 4, r / 8);
    for (int p = 0; p < 4; ++p) { ((float2 *) (dst + blockIdx.x * stride_dst + blockIdx.y * 256 + threadIdx.x * 8))[p] = v[p]; }
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Products

static constexpr __host__ __device__ int mmq_repacked_smem(const ggml_type type, const int ntiles, const int nwarps, const int nstages) {
    return nstages * (nwarps * mmq_repacked_half(type) + ntiles * 2048) +
           (nstages / 2 + 1) * (nwarps * mmq_repacked_meta(type) + (mmq_repacked_has_mins(type) ? ntiles * 256 : 0));
}

#ifdef AMPERE_MMA_AVAILABLE
static __device__ __forceinline__ uint32_t mmq_repacked_shared(const void * p) { return (uint32_t) __cvta_generic_to_shared(p); }

static __device__ __forceinline__ void mmq_repacked_copy(const uint32_t dst, const void * src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

static __device__ __forceinline__ void mmq_repacked_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int n>
static __device__ __forceinline__ void mmq_repacked_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

static __device__ __forceinline__ void mmq_repacked_mma(float (&d)[4], const uint32_t * a, const uint32_t b0, const uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ uint4 mmq_repacked_load_16(const uint32_t a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory");
    return v;
}

static __device__ __forceinline__ uint2 mmq_repacked_load_8(const uint32_t a) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory");
    return v;
}

static __device__ __forceinline__ uint32_t mmq_repacked_load_2(const uint32_t a) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a) : "memory");
    return v;
}

static __device__ __forceinline__ float mmq_repacked_float(const uint32_t x) { // of the lower half
    return __half2float(__ushort_as_half((unsigned short) (x & 0xffff)));
}

// The minimums of 32 columns 2*t and 2*t + 1 of a row as integers, which are subnormals in FP16
static __device__ __forceinline__ uint32_t mmq_repacked_mins(const uint4 & m, const int t) {
    const uint32_t near = (m.z >> (6 * (t & 1))) & 0x003f003f;
    const uint32_t far  = (((t & 1 ? m.y : m.x) >> 12) & 0x000f000f) | ((m.z >> (8 + 2 * (t & 1))) & 0x00300030);
    return t < 2 ? near : far;
}

// The A operands of two products from the quants w and their high bits of rows g and g + 8; s0, s8: scales; s0h, s8h: scales/16 for quants
//     that lie 4 bits higher; m0, m8: what Q6_K adds
template <ggml_type type>
static __device__ __forceinline__ void mmq_repacked_operands(uint32_t (&a)[8], const uint32_t (&w)[4], const uint32_t high, const half2 s0,
        const half2 s8, const half2 s0h, const half2 s8h, const half2 m0, const half2 m8) {
    if constexpr (mmq_repacked_has_mins(type)) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const half2    s = r ? s8 : s0, sh = r ? s8h : s0h;
            const uint32_t q = w[r], q8 = q >> 8;
            uint32_t       v[4] = { q & 0x000f000f, q & 0x00f000f0, q8 & 0x000f000f, q8 & 0x00f000f0 };
            if constexpr (type == GGML_TYPE_Q5_K) { // bit 2*p + r of each half is that of pair p, and belongs to bit 4 or 8
                const uint32_t h = high >> r;
                v[0] |= (h << 4) & 0x00100010;
                v[1] |= (h << 6) & 0x01000100;
                v[2] |= h & 0x00100010;
                v[3] |= (h << 2) & 0x01000100;
            }
#pragma unroll
            for (int p = 0; p < 4; ++p) { a[2 * p + r] = mmq_repacked_u32(__hmul2(mmq_repacked_half2(v[p]), p & 1 ? sh : s)); }
        }
    } else if constexpr (type == GGML_TYPE_Q6_K) {
        const uint32_t h = high, h2 = h >> 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const half2    s = r ? s8 : s0, sh = r ? s8h : s0h, m = r ? m8 : m0;
            const uint32_t q = w[r], q8 = q >> 8;
            const uint32_t v[4] = { (q & 0x000f000f) | ((r ? h << 4 : h) & 0x00300030), (q & 0x00f000f0) | ((r ? h >> 4 : h) & 0x03000300),
                (q8 & 0x000f000f) | ((r ? h << 2 : h2) & 0x00300030), (q8 & 0x00f000f0) | ((r ? h >> 6 : h2) & 0x03000300) };
#pragma unroll
            for (int p = 0; p < 4; ++p) { a[2 * p + r] = mmq_repacked_u32(__hfma2(mmq_repacked_half2(v[p]), p & 1 ? sh : s, m)); }
        }
    } else {
        const half2 bias = mmq_repacked_half2(0xe480e480); // -1152
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int p = 0; p < 4; ++p) { // bytes, with 128 added
                a[2 * p + r] =
                        mmq_repacked_u32(__hadd2(mmq_repacked_half2(__byte_perm(w[2 * r + p / 2], 0x64646464, p & 1 ? 0x4342 : 0x4140)), bias));
            }
        }
    }
}

// The A operands of 128 columns of a unit (a half h), in the order of its four parts of 32 columns
template <ggml_type type>
struct mmq_repacked_half_unit {
    uint32_t q;              // this lane's quants
    uint32_t w0, w8, d0, d8; // scales of rows g and g + 8
    uint4    quad, hi4;
    half2    p0, p8, p0h, p8h;

    // mine: scales of the unit, q: quants of this half and lane, both in shared memory
    __device__ __forceinline__ mmq_repacked_half_unit(const uint32_t mine, const uint32_t q, const int h, const int lane) : q(q), d0(0), d8(0) {
        const int g = lane / 4, t = lane % 4;
        // scales: pairs of 6 bits for 32 columns (Q4_K, Q5_K), a byte for 16 (Q6_K), FP16 for 32 (Q8_0)
        if constexpr (mmq_repacked_has_mins(type)) {
            const uint4 r0 = mmq_repacked_load_16(mine + g * 16), r8 = mmq_repacked_load_16(mine + g * 16 + 128);
            w0 = h ? r0.y : r0.x;
            w8 = h ? r8.y : r8.x;
        } else if constexpr (type == GGML_TYPE_Q6_K) {
            const uint2 r0 = mmq_repacked_load_8(mine + g * 16 + (t / 2) * 8), r8 = mmq_repacked_load_8(mine + g * 16 + 128 + (t / 2) * 8);
            w0 = h ? r0.y : r0.x;
            w8 = h ? r8.y : r8.x;
        } else {
            const uint2 r0 = mmq_repacked_load_8(mine + g * 16 + h * 8), r8 = mmq_repacked_load_8(mine + g * 16 + 128 + h * 8);
            w0 = r0.x;
            d0 = r0.y;
            w8 = r8.x;
            d8 = r8.y;
        }
        hi4 = make_uint4(0, 0, 0, 0);
        if constexpr (type == GGML_TYPE_Q6_K) {
            hi4 = mmq_repacked_load_16(q + 1024);
        } else if constexpr (type == GGML_TYPE_Q5_K) {
            const uint2 v = mmq_repacked_load_8(q + 1024 - lane * 8);
            hi4           = make_uint4(v.x & 0xffff, v.x >> 16, v.y & 0xffff, v.y >> 16);
        }
    }

    // of the 32 columns b, for b = 0, 1, 2, 3
    __device__ __forceinline__ void operands(uint32_t (&a)[8], const int b) {
        uint32_t words[4];
        if (type == GGML_TYPE_Q8_0 || b % 2 == 0) { quad = mmq_repacked_load_16(q + (type == GGML_TYPE_Q8_0 ? b : b / 2) * 512); }
        words[0]      = type != GGML_TYPE_Q8_0 && b % 2 ? quad.z : quad.x;
        words[1]      = type != GGML_TYPE_Q8_0 && b % 2 ? quad.w : quad.y;
        words[2]      = quad.z;
        words[3]      = quad.w;
        uint32_t high = b == 0 ? hi4.x : b == 1 ? hi4.y : b == 2 ? hi4.z : hi4.w;
        half2    s0, s8, s0h, s8h, m0, m8;
        s0 = s8 = s0h = s8h = m0 = m8 = mmq_repacked_half2(0);
        if constexpr (mmq_repacked_has_mins(type)) {
            if (b % 2 == 0) {
                const half2 magic     = mmq_repacked_half2(0xe400e400); // -1024
                const half2 sixteenth = mmq_repacked_half2(0x2c002c00);
                p0                    = __hadd2(mmq_repacked_half2(((w0 >> (b * 3)) & 0x003f003f) | 0x64006400), magic);
                p8                    = __hadd2(mmq_repacked_half2(((w8 >> (b * 3)) & 0x003f003f) | 0x64006400), magic);
                p0h                   = __hmul2(p0, sixteenth);
                p8h                   = __hmul2(p8, sixteenth);
            }
            s0  = b % 2 ? __high2half2(p0) : __low2half2(p0);
            s8  = b % 2 ? __high2half2(p8) : __low2half2(p8);
            s0h = b % 2 ? __high2half2(p0h) : __low2half2(p0h);
            s8h = b % 2 ? __high2half2(p8h) : __low2half2(p8h);
            if constexpr (type == GGML_TYPE_Q5_K) { // of element e of pair p in row g + 8*r bit 8*e + 2*p + r
                high = (high & 0xff) | ((high & 0xff00) << 8);
            }
        } else if constexpr (type == GGML_TYPE_Q6_K) {
            const half2    bias      = mmq_repacked_half2(0xe480e480); // -1152
            const half2    sixteenth = mmq_repacked_half2(0x2c002c00);
            const half2    minus     = mmq_repacked_half2(0x80208020); // -32*2^-24
            const uint32_t pick      = 0x4040 + b * 0x0101;
            s0                       = __hadd2(mmq_repacked_half2(__byte_perm(w0, 0x64646464, pick)), bias);
            s8                       = __hadd2(mmq_repacked_half2(__byte_perm(w8, 0x64646464, pick)), bias);
            s0h                      = __hmul2(s0, sixteenth);
            s8h                      = __hmul2(s8, sixteenth);
            m0                       = __hmul2(s0, minus);
            m8                       = __hmul2(s8, minus);
        }
        mmq_repacked_operands<type>(a, words, high, s0, s8, s0h, s8h, m0, m8);
    }
};
#endif // AMPERE_MMA_AVAILABLE

struct mmq_repacked_params {
    const char * rows[MMQ_REPACKED_MAX_MATRICES];
    float *      dst[MMQ_REPACKED_MAX_MATRICES];
    int          row_tiles[MMQ_REPACKED_MAX_MATRICES]; // of 16 rows
    int          tile_end[MMQ_REPACKED_MAX_MATRICES];  // tiles of 16*nwarps rows of the matrices up to this one
    const char * columns;
    const char * sums;
    float4 *     parts;   // [2*blocks][nwarps][ntiles][32]
    int *        arrived; // a zero for each tile
    int          ks;      // super-blocks of a row
    int          iters;   // super-blocks of a block
    int          total;
    int          ncols;
};

#if defined(GGML_USE_HIP) || defined(GGML_USE_MUSA) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < GGML_CUDA_CC_VOLTA)
#define MMQ_REPACKED_PARAMS const
#else
#define MMQ_REPACKED_PARAMS const __grid_constant__
#endif // defined(GGML_USE_HIP) || defined(GGML_USE_MUSA) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < GGML_CUDA_CC_VOLTA)

// NT: tiles of 8 columns, S: stages of half a super-block in shared memory
template <ggml_type type, int NT, int WARPS, int S>
static __global__ void __launch_bounds__(WARPS * 32) mul_mat_q_repacked(MMQ_REPACKED_PARAMS mmq_repacked_params p) {
#ifdef AMPERE_MMA_AVAILABLE
    constexpr int  META = mmq_repacked_meta(type), HALF = mmq_repacked_half(type), UNIT = mmq_repacked_unit(type), M = S / 2 + 1;
    constexpr bool MINS  = mmq_repacked_has_mins(type);
    constexpr int  STAGE = WARPS * HALF + NT * 2048, MSTAGE = WARPS * META + (MINS ? NT * 256 : 0);

    ggml_cuda_pdl_lc();

    extern __shared__ __align__(16) char smem[];
    __shared__ int                       is_last;
    const uint32_t                       sm = mmq_repacked_shared(smem), smeta = sm + S * STAGE;
    const int                            tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    const int                            ks = p.ks;

    const int begin = blockIdx.x * p.iters, end = min(begin + p.iters, p.total);
    const int nsteps = 2 * (end - begin);

    // first tile of the matrix m of this tile
    const auto find_matrix = [&](const int tile, int & m) {
        m = 0;
        while (tile >= p.tile_end[m]) { ++m; }
        return m == 0 ? 0 : p.tile_end[m - 1];
    };

    // copies run S - 1 half super-blocks ahead; pointers are this thread's
    int          c_tile = begin / ks, c_k = begin - c_tile * ks, c_step = 0;
    uint32_t     c_stage = sm, c_meta = smeta;
    const char * c_src;
    bool         c_rows;
    const auto   find_rows = [&]() {
        int       m;
        const int tile = (c_tile - find_matrix(c_tile, m)) * WARPS + warp;
        c_rows         = tile < p.row_tiles[m];
        c_src          = p.rows[m] + ((size_t) tile * ks + c_k) * UNIT + lane * 16;
    };
    find_rows();
    const auto request_rows = [&](const int h) {
        if (c_step < nsteps) {
            if (c_rows) {
                const char *   src = c_src + META + h * HALF;
                const uint32_t to  = c_stage + warp * HALF + lane * 16;
#pragma unroll
                for (int i = 0; i < HALF; i += 512) {
                    if (i + 512 <= HALF || i + lane * 16 < HALF) { mmq_repacked_copy(to + i, src + i); }
                }
                if (h == 0 && lane * 16 < META) { mmq_repacked_copy(c_meta + warp * META + lane * 16, c_src); }
            }
            if (h == 1) {
                c_src += UNIT;
                c_meta = c_meta == smeta + (M - 1) * MSTAGE ? smeta : c_meta + MSTAGE;
                if (++c_k == ks) {
                    c_k = 0;
                    ++c_tile;
                    if (c_step + 1 < nsteps) { find_rows(); }
                }
            }
            ++c_step;
            c_stage = c_stage == sm + (S - 1) * STAGE ? sm : c_stage + STAGE;
        }
    };
    const auto request_columns = [&](const int h, const uint32_t to, const uint32_t to_meta, const int k) {
#pragma unroll
        for (int i = 0; i < NT * 128; i += WARPS * 32) {
            if (i + WARPS * 32 <= NT * 128 || i + tid < NT * 128) {
                mmq_repacked_copy(to + WARPS * HALF + (i + tid) * 16, p.columns + (size_t) (2 * k + h) * (NT * 2048) + (i + tid) * 16);
            }
        }
        if (MINS && h == 0 && tid < NT * 16) { mmq_repacked_copy(to_meta + WARPS * META + tid * 16, p.sums + (size_t) k * (NT * 256) + tid * 16); }
    };

    // rows are requested before there are columns
#pragma unroll
    for (int i = 0; i < S - 1; ++i) { request_rows(i % 2); }
    ggml_cuda_pdl_sync();
#pragma unroll
    for (int i = 0; i < S - 1; ++i) {
        if (i < nsteps) { request_columns(i % 2, sm + i * STAGE, smeta + i / 2 * MSTAGE, (begin + i / 2) % ks); }
        mmq_repacked_commit();
    }

    float acc[NT][4], part[NT][4];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) { acc[n][i] = 0.0f; }
    }

    uint32_t stage = sm, meta = smeta;
    int      tile = begin / ks, k = begin - tile * ks;
    for (int at = begin; at < end; ++at) {
        const uint32_t mine = meta + warp * META;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) { part[n][i] = 0.0f; }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            mmq_repacked_wait<S - 2>();
            __syncthreads();
            if (c_step < nsteps) { request_columns((h + S - 1) % 2, c_stage, c_meta, c_k); }
            request_rows((h + S - 1) % 2);
            mmq_repacked_commit();

            const uint32_t q = stage + warp * HALF + lane * 16, cols = stage + WARPS * HALF + lane * 16;
            stage = stage == sm + (S - 1) * STAGE ? sm : stage + STAGE;

            mmq_repacked_half_unit<type> unit(mine, q, h, lane);
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                uint32_t a[8];
                unit.operands(a, b);
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const uint4 x = mmq_repacked_load_16(cols + (b * NT + n) * 512);
                    if constexpr (type == GGML_TYPE_Q8_0) { part[n][0] = part[n][1] = part[n][2] = part[n][3] = 0.0f; }
                    mmq_repacked_mma(part[n], a, x.x, x.y);
                    mmq_repacked_mma(part[n], a + 4, x.z, x.w);
                    if constexpr (type == GGML_TYPE_Q8_0) {
                        const float f0 = mmq_repacked_float((b < 2 ? unit.w0 : unit.d0) >> (16 * (b % 2)));
                        const float f8 = mmq_repacked_float((b < 2 ? unit.w8 : unit.d8) >> (16 * (b % 2)));
                        acc[n][0]      = fmaf(f0, part[n][0], acc[n][0]);
                        acc[n][1]      = fmaf(f0, part[n][1], acc[n][1]);
                        acc[n][2]      = fmaf(f8, part[n][2], acc[n][2]);
                        acc[n][3]      = fmaf(f8, part[n][3], acc[n][3]);
                    }
                }
            }
        }
        if constexpr (MINS) {
            const uint4 r0 = mmq_repacked_load_16(mine + g * 16), r8 = mmq_repacked_load_16(mine + g * 16 + 128);
            const float f0 = mmq_repacked_float(r0.w) * 16777216.0f, f8 = mmq_repacked_float(r8.w) * 16777216.0f;                 // d*2^24
            const float n0 = mmq_repacked_float(r0.w >> 16) * -536870912.0f, n8 = mmq_repacked_float(r8.w >> 16) * -536870912.0f; // -dmin*2^24*32
            uint32_t    a[4];
            a[0] = a[2] = mmq_repacked_mins(r0, t);
            a[1] = a[3] = mmq_repacked_mins(r8, t);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const uint2 x    = mmq_repacked_load_8(meta + WARPS * META + n * 256 + lane * 8);
                float       m[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
                mmq_repacked_mma(m, a, x.x, x.y);
                acc[n][0] = fmaf(n0, m[0], fmaf(f0, part[n][0], acc[n][0]));
                acc[n][1] = fmaf(n0, m[1], fmaf(f0, part[n][1], acc[n][1]));
                acc[n][2] = fmaf(n8, m[2], fmaf(f8, part[n][2], acc[n][2]));
                acc[n][3] = fmaf(n8, m[3], fmaf(f8, part[n][3], acc[n][3]));
            }
        } else if constexpr (type == GGML_TYPE_Q6_K) {
            const float f0 = mmq_repacked_float(mmq_repacked_load_2(mine + 256 + g * 2)) * 16777216.0f; // d*2^24
            const float f8 = mmq_repacked_float(mmq_repacked_load_2(mine + 272 + g * 2)) * 16777216.0f;
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                acc[n][0] = fmaf(f0, part[n][0], acc[n][0]);
                acc[n][1] = fmaf(f0, part[n][1], acc[n][1]);
                acc[n][2] = fmaf(f8, part[n][2], acc[n][2]);
                acc[n][3] = fmaf(f8, part[n][3], acc[n][3]);
            }
        }
        meta = meta == smeta + (M - 1) * MSTAGE ? smeta : meta + MSTAGE;

        if (++k == ks || at + 1 == end) { // these rows are done as far as this block goes
            const int first = tile * ks / p.iters, last = ((tile + 1) * ks - 1) / p.iters;
            bool      write = true;
            if (first != last) {
                const int slot = 2 * blockIdx.x + (begin / ks == tile ? 0 : 1);
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    p.parts[((size_t) (slot * WARPS + warp) * NT + n) * 32 + lane] = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
                }
                __threadfence();
                __syncthreads();
                if (tid == 0) { is_last = atomicAdd(p.arrived + tile, 1) == last - first; }
                __syncthreads();
                write = is_last != 0;
                if (write) {
                    __threadfence();
                    if (tid == 0) { p.arrived[tile] = 0; }
#pragma unroll
                    for (int n = 0; n < NT; ++n) { acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f; }
                    for (int b = first; b <= last; ++b) {
                        const int from = 2 * b + (b * p.iters / ks == tile ? 0 : 1);
#pragma unroll
                        for (int n = 0; n < NT; ++n) {
                            const float4 v = __ldcg(p.parts + ((size_t) (from * WARPS + warp) * NT + n) * 32 + lane);
                            acc[n][0] += v.x;
                            acc[n][1] += v.y;
                            acc[n][2] += v.z;
                            acc[n][3] += v.w;
                        }
                    }
                }
            }
            int       m;
            const int row_tile = (tile - find_matrix(tile, m)) * WARPS + warp;
            const int nrows    = p.row_tiles[m] * 16;
            if (write && row_tile * 16 < nrows) {
                float * dst = p.dst[m] + row_tile * 16 + g;
#pragma unroll
                for (int n = 0; n < NT; ++n) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int col = n * 8 + 2 * t + e;
                        if (col < p.ncols) {
                            dst[(size_t) col * nrows]     = acc[n][e];
                            dst[(size_t) col * nrows + 8] = acc[n][2 + e];
                        }
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) { acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f; }
            k = 0;
            ++tile;
        }
    }
#else
    GGML_UNUSED(p);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Products with up to 16 columns, on Hopper
//
// The warps of a block take the units of some rows in turn, each into a ring of its own (cp.async.bulk), from before the kernel in front of
//     this one has ended. No warp waits for another one until all units of some rows are multiplied. What they give lies in shared memory and
//     is added up in the order of mul_mat_q_repacked, with the same bits.

static constexpr int MMQ_REPACKED_FEW_WARPS    = 16;
static constexpr int MMQ_REPACKED_FEW_SMEM     = 84 * 1024;  // of a multiprocessor's block: with 208 KB a step of one column takes 1.09 times as long
static constexpr int MMQ_REPACKED_FEW_SMEM_MAX = 208 * 1024; // where columns take more
static constexpr int MMQ_REPACKED_FEW_MAX_STAGES = 8;

struct mmq_repacked_few_params {
    const char * rows[MMQ_REPACKED_MAX_MATRICES];
    float *      dst[MMQ_REPACKED_MAX_MATRICES];
    int          row_end[MMQ_REPACKED_MAX_MATRICES];    // 16 rows each, of the matrices up to this one
    int          first_tile[MMQ_REPACKED_MAX_MATRICES]; // of mul_mat_q_repacked
    const char * columns;
    const char * sums;
    int          ks;
    int          ncols;
    int          iters;   // of mul_mat_q_repacked
    int          nwarps;  // of mul_mat_q_repacked
    int          nrows;   // 16 each, of all matrices
    int          batch;   // of them that a block adds up at a time
    int          buffers; // of results, 1 if there is one such batch
    int          nstages;
};

// Of a unit: factors of the rows, then what they are multiplied with, for each column
static constexpr __host__ __device__ int mmq_repacked_few_results(const ggml_type type, const int ncols) {
    return (ncols + 1) * 16 * (mmq_repacked_has_mins(type) ? 8 : 4);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
static __device__ __forceinline__ void mmq_repacked_store(const uint32_t a, const float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(x) : "memory");
}

static __device__ __forceinline__ void mmq_repacked_store(const uint32_t a, const float x, const float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(a), "f"(x), "f"(y) : "memory");
}
#endif // defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER

template <ggml_type type, int NC>
static __global__ void __launch_bounds__(MMQ_REPACKED_FEW_WARPS * 32, 1) mul_mat_q_repacked_few(MMQ_REPACKED_PARAMS mmq_repacked_few_params p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
    constexpr int  META = mmq_repacked_meta(type), HALF = mmq_repacked_half(type), UNIT = mmq_repacked_unit(type);
    constexpr int  WARPS = MMQ_REPACKED_FEW_WARPS, RES = mmq_repacked_few_results(type, NC), NT = (NC + 7) / 8;
    constexpr bool MINS = mmq_repacked_has_mins(type);
    static_assert(type != GGML_TYPE_Q8_0, "results of 32 columns each");

    ggml_cuda_pdl_lc();

    extern __shared__ __align__(16) char smem[];
    __shared__ uint64_t                  barriers[WARPS][MMQ_REPACKED_FEW_MAX_STAGES];
    const int                            tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;

    const int r0 = (int64_t) blockIdx.x * p.nrows / gridDim.x, r1 = (int64_t) (blockIdx.x + 1) * p.nrows / gridDim.x; // 16 rows each
    const int total = (r1 - r0) * p.ks;

    const uint32_t ring    = mmq_repacked_shared(smem) + warp * p.nstages * UNIT;
    const uint32_t columns = mmq_repacked_shared(smem) + WARPS * p.nstages * UNIT;
    const uint32_t sums    = columns + p.ks * (NC * 512);
    const uint32_t results = sums + (MINS ? p.ks * (NC * 32) : 0);
    const uint32_t full    = mmq_repacked_shared(barriers[warp]);

    const auto find_matrix = [&](const int r, int & m) {
        m = 0;
        while (r >= p.row_end[m]) { ++m; }
        return m == 0 ? 0 : p.row_end[m - 1];
    };

    int        c_at    = warp; // what is copied next
    const auto request = [&](const int stage) {
        if (c_at < total) {
            const int r = r0 + c_at / p.ks, k = c_at % p.ks;
            int       m;
            const int first = find_matrix(r, m);
            bulk_barrier_expect(full + 8 * stage, UNIT);
            bulk_copy(ring + stage * UNIT, p.rows[m] + ((size_t) (r - first) * p.ks + k) * UNIT, UNIT, full + 8 * stage, bulk_policy_evict_first());
            c_at += WARPS;
        }
    };
    if (lane == 0) {
        for (int s = 0; s < p.nstages; ++s) { bulk_barrier_init(full + 8 * s, 1); }
        bulk_barrier_init_fence();
        for (int s = 0; s < p.nstages; ++s) { request(s); }
    }
    __syncwarp();
    ggml_cuda_pdl_sync();
    for (int i = tid; i < p.ks * 8 * NC * 4; i += WARPS * 32) {
        const uint4 v = *(const uint4 *) (p.columns + (size_t) (i / (NC * 4)) * (NT * 512) + i % (NC * 4) * 16);
        *(uint4 *) (smem + (columns - mmq_repacked_shared(smem)) + i * 16) = v;
    }
    if (MINS) {
        for (int i = tid; i < p.ks * NC * 2; i += WARPS * 32) {
            const uint4 v = *(const uint4 *) (p.sums + (size_t) (i / (NC * 2)) * (NT * 256) + i % (NC * 2) * 16);
            *(uint4 *) (smem + (sums - mmq_repacked_shared(smem)) + i * 16) = v;
        }
    }
    __syncthreads();

    const int col = min(g, NC - 1); // of the first B operands of this lane
    int       at = warp, stage = 0, parity = 0, buffer = 0;
    for (int b0 = r0; b0 < r1; b0 += p.batch) {
        const int      b1  = min(b0 + p.batch, r1);
        const uint32_t res = results + buffer * p.batch * p.ks * RES;
        for (; at < (b1 - r0) * p.ks; at += WARPS) {
            const int      r = r0 + at / p.ks, k = at % p.ks;
            const uint32_t mine = ring + stage * UNIT;
            bulk_barrier_wait(full + 8 * stage, parity);

            float part[NT][4] = { { 0.0f } };
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                mmq_repacked_half_unit<type> unit(mine, mine + META + h * HALF + lane * 16, h, lane);
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    uint32_t a[8];
                    unit.operands(a, b);
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        const uint4 x = mmq_repacked_load_16(columns + ((k * 8 + h * 4 + b) * NC + n * 8 + col) * 64 + t * 16);
                        mmq_repacked_mma(part[n], a, x.x, x.y);
                        mmq_repacked_mma(part[n], a + 4, x.z, x.w);
                    }
                }
            }
            // thread t has columns 2*t and 2*t + 1 of each 8
            const uint32_t to = res + ((r - b0) * p.ks + k) * RES;
            if constexpr (MINS) {
                const uint4 m0 = mmq_repacked_load_16(mine + g * 16), m8 = mmq_repacked_load_16(mine + g * 16 + 128);
                uint32_t    a[4];
                a[0] = a[2] = mmq_repacked_mins(m0, t);
                a[1] = a[3] = mmq_repacked_mins(m8, t);
                if (t == 0) {
                    mmq_repacked_store(to + g * 8, mmq_repacked_float(m0.w) * 16777216.0f, mmq_repacked_float(m0.w >> 16) * -536870912.0f);
                    mmq_repacked_store(to + g * 8 + 64, mmq_repacked_float(m8.w) * 16777216.0f, mmq_repacked_float(m8.w >> 16) * -536870912.0f);
                }
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const uint2 x    = mmq_repacked_load_8(sums + (k * NC + n * 8 + col) * 32 + t * 8);
                    float       m[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
                    mmq_repacked_mma(m, a, x.x, x.y);
                    if (2 * t < NC) {
#pragma unroll
                        for (int e = 0; e < (NC == 1 ? 1 : 2); ++e) {
                            mmq_repacked_store(to + (n * 8 + 2 * t + e + 1) * 128 + g * 8, part[n][e], m[e]);
                            mmq_repacked_store(to + (n * 8 + 2 * t + e + 1) * 128 + g * 8 + 64, part[n][2 + e], m[2 + e]);
                        }
                    }
                }
            } else {
                if (t == 0) {
                    mmq_repacked_store(to + g * 4, mmq_repacked_float(mmq_repacked_load_2(mine + 256 + g * 2)) * 16777216.0f);
                    mmq_repacked_store(to + g * 4 + 32, mmq_repacked_float(mmq_repacked_load_2(mine + 272 + g * 2)) * 16777216.0f);
                }
                if (2 * t < NC) {
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
#pragma unroll
                        for (int e = 0; e < (NC == 1 ? 1 : 2); ++e) {
                            mmq_repacked_store(to + (n * 8 + 2 * t + e + 1) * 64 + g * 4, part[n][e]);
                            mmq_repacked_store(to + (n * 8 + 2 * t + e + 1) * 64 + g * 4 + 32, part[n][2 + e]);
                        }
                    }
                }
            }

            // the unit has been read: what was multiplied with it is stored
            __syncwarp();
            if (lane == 0) { request(stage); }
            if (++stage == p.nstages) {
                stage = 0;
                parity ^= 1;
            }
        }
        __syncthreads();

        // a thread a row and column
        for (int i = tid; i < (b1 - b0) * (16 * NC); i += WARPS * 32) {
            const int    row = i % 16, c = i / 16 % NC, r = b0 + i / (16 * NC);
            int          m;
            const int    first = find_matrix(r, m);
            const int    begin = (p.first_tile[m] + (r - first) / p.nwarps) * p.ks; // in the order of mul_mat_q_repacked
            const char * from  = smem + (res - mmq_repacked_shared(smem)) + (r - b0) * p.ks * RES;
            float        acc = 0.0f, sum = 0.0f;
            int          left = p.iters - begin % p.iters;
            const bool   one  = left >= p.ks;
#pragma unroll 4
            for (int k = 0; k < p.ks; ++k) {
                if constexpr (MINS) {
                    const float2 f = ((const float2 *) (from + k * RES))[row], v = ((const float2 *) (from + k * RES))[(c + 1) * 16 + row];
                    acc = fmaf(f.y, v.y, fmaf(f.x, v.x, acc));
                } else {
                    acc = fmaf(((const float *) (from + k * RES))[row], ((const float *) (from + k * RES))[(c + 1) * 16 + row], acc);
                }
                if (--left == 0 && k + 1 < p.ks) {
                    sum += acc;
                    acc  = 0.0f;
                    left = p.iters;
                }
            }
            if (c < p.ncols) { p.dst[m][((size_t) c * (p.row_end[m] - first) + r - first) * 16 + row] = one ? acc : sum + acc; }
        }
        buffer = p.buffers - 1 - buffer;
    }
#else
    GGML_UNUSED(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
}

size_t ggml_cuda_mmq_repacked_columns_size(const int64_t ncols, const int64_t k) {
    const int64_t ntiles = ggml_cuda_columns_mma_tiles(ncols);
    return k / 32 * ntiles * 512 + k / 256 * ntiles * 256;
}

static __global__ void mmq_repacked_convert_columns(const float4 * x, const ggml_cuda_columns_out columns) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x; // k is a multiple of 256
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    if (i < (int64_t) columns.ne1 * (columns.ne0 / 4)) { store_columns(columns, i, x[i]); }
}

void ggml_cuda_mmq_repacked_columns(const float * x, void * columns, const int64_t ncols, const int64_t k, cudaStream_t stream) {
    ggml_cuda_columns_out out;
    out.data                                           = columns;
    out.layout                                         = GGML_CUDA_QUANTIZED_F16_MMA;
    out.ne0                                            = k;
    out.ne1                                            = ncols;
    const ggml_cuda_kernel_launch_params launch_params = ggml_cuda_kernel_launch_params(dim3((ncols * k / 4 + 127) / 128), dim3(128), 0, stream);
    ggml_cuda_kernel_launch(mmq_repacked_convert_columns, launch_params, (const float4 *) x, out);
}

bool ggml_cuda_can_repack(const ggml_tensor * src0, const int cc) {
    return ampere_mma_available(cc) && ggml_is_matrix(src0) && ggml_is_contiguous(src0) && src0->view_src == nullptr &&
           (src0->type == GGML_TYPE_Q4_K || src0->type == GGML_TYPE_Q5_K || src0->type == GGML_TYPE_Q6_K || src0->type == GGML_TYPE_Q8_0) &&
           src0->ne[1] % 16 == 0 && src0->ne[1] <= MMQ_REPACKED_MAX_ROWS && src0->ne[0] % MATRIX_ROW_PADDING == 0 && (uintptr_t) src0->data % 16 == 0;
}

template <typename F>
static void mmq_repacked_switch_type(const ggml_type type, const F & f) {
    switch (type) {
        case GGML_TYPE_Q4_K:
            f(std::integral_constant<ggml_type, GGML_TYPE_Q4_K>());
            break;
        case GGML_TYPE_Q5_K:
            f(std::integral_constant<ggml_type, GGML_TYPE_Q5_K>());
            break;
        case GGML_TYPE_Q6_K:
            f(std::integral_constant<ggml_type, GGML_TYPE_Q6_K>());
            break;
        case GGML_TYPE_Q8_0:
            f(std::integral_constant<ggml_type, GGML_TYPE_Q8_0>());
            break;
        default:
            GGML_ABORT("fatal error");
    }
}

void ggml_cuda_repack(const ggml_tensor * src0, const void * blocks, void * repacked, cudaStream_t stream) {
    const int nblocks_k = src0->ne[0] / 256;
    mmq_repacked_switch_type(src0->type, [&](auto type) {
        mmq_repack<type.value><<<src0->ne[1] / 16 * nblocks_k, 256, 0, stream>>>((const uint8_t *) blocks, (uint8_t *) repacked, nblocks_k);
    });
    CUDA_CHECK(cudaGetLastError());
}

void ggml_cuda_unpack(const ggml_tensor * src0, const void * repacked, void * blocks, cudaStream_t stream) {
    const int nblocks_k = src0->ne[0] / 256;
    mmq_repacked_switch_type(src0->type, [&](auto type) {
        mmq_unpack<type.value><<<src0->ne[1] / 16 * nblocks_k, 256, 0, stream>>>((const uint8_t *) repacked, (uint8_t *) blocks, nblocks_k);
    });
    CUDA_CHECK(cudaGetLastError());
}

void ggml_cuda_repacked_to_fp16(const ggml_tensor * src0, half * y, cudaStream_t stream) {
    const int nblocks_k = src0->ne[0] / 256;
    mmq_repacked_switch_type(src0->type, [&](auto type) {
        mmq_units_to_fp16<type.value><<<src0->ne[1] / 16 * nblocks_k, 256, 0, stream>>>((const uint8_t *) src0->data, y, nblocks_k);
    });
    CUDA_CHECK(cudaGetLastError());
}

void ggml_cuda_get_rows_repacked(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * src0      = dst->src[0];
    const int           nblocks_k = src0->ne[0] / 256;
    mmq_repacked_switch_type(src0->type, [&](auto type) {
        mmq_unit_get_rows<type.value><<<dim3(dst->ne[1], nblocks_k), 32, 0, ctx.stream()>>>(
                (const uint8_t *) src0->data, (const int32_t *) dst->src[1]->data, (float *) dst->data, nblocks_k, dst->nb[1] / sizeof(float));
    });
    CUDA_CHECK(cudaGetLastError());
}

template <ggml_type type, int ntiles, int nwarps>
static void launch_mul_mat_q_repacked(ggml_backend_cuda_context & ctx, const mmq_repacked_matrix * matrices, const int n, const void * columns,
        const int64_t ncols, const int64_t k, const int nblocks_max) {
    constexpr bool is_q8   = type == GGML_TYPE_Q8_0;
    constexpr int  nstages = ntiles == 1          ? (is_q8 ? 5 : 6) :
                             ntiles == 2          ? (is_q8 ? 4 : 5) :
                             ntiles == 4          ? (is_q8 ? 3 : 4) :
                             is_q8 && nwarps == 8 ? 2 :
                                                    3;
    constexpr int  smem    = mmq_repacked_smem(type, ntiles, nwarps, nstages);
    static_assert(smem < 99 * 1024, "more shared memory than a block has");

    mmq_repacked_params p;
    int                 tiles = 0;
    for (int i = 0; i < MMQ_REPACKED_MAX_MATRICES; ++i) {
        const mmq_repacked_matrix & matrix = matrices[i < n ? i : 0];
        p.rows[i]                          = (const char *) matrix.rows;
        p.dst[i]                           = matrix.dst;
        p.row_tiles[i]                     = matrix.nrows / 16;
        tiles += i < n ? (p.row_tiles[i] + nwarps - 1) / nwarps : 0;
        p.tile_end[i] = tiles;
    }
    p.columns         = (const char *) columns;
    p.sums            = (const char *) columns + k / 32 * ntiles * 512;
    p.ks              = k / 256;
    p.total           = tiles * p.ks;
    p.iters           = (p.total + nblocks_max - 1) / nblocks_max;
    p.ncols           = ncols;
    const int nblocks = (p.total + p.iters - 1) / p.iters;

    ggml_cuda_pool_alloc<float4> parts(ctx.pool());
    p.parts = nullptr;
    if (p.iters % p.ks != 0) { // blocks share rows
        parts.alloc((size_t) 2 * nblocks * nwarps * ntiles * 32);
        p.parts = parts.get();
    }
    constexpr int max_tiles = MMQ_REPACKED_MAX_MATRICES * MMQ_REPACKED_MAX_ROWS / 64;
    int *&        arrived   = ctx.mmq_repacked_arrived[ctx.curr_stream_no];
    if (arrived == nullptr) {
        CUDA_CHECK(cudaMalloc((void **) &arrived, max_tiles * sizeof(int)));
        CUDA_CHECK(cudaMemsetAsync(arrived, 0, max_tiles * sizeof(int), ctx.stream()));
    }
    p.arrived = arrived;

    CUDA_SET_SHARED_MEMORY_LIMIT((mul_mat_q_repacked<type, ntiles, nwarps, nstages>), smem);
    const ggml_cuda_kernel_launch_params launch_params = ggml_cuda_kernel_launch_params(dim3(nblocks), dim3(32 * nwarps), smem, ctx.stream());
    ggml_cuda_kernel_launch(mul_mat_q_repacked<type, ntiles, nwarps, nstages>, launch_params, p);
}

template <ggml_type type, int nwarps>
static void mul_mat_q_repacked_switch_ncols(ggml_backend_cuda_context & ctx, const mmq_repacked_matrix * matrices, const int n, const void * columns,
        const int64_t ncols, const int64_t k, const int nblocks_max) {
    switch (ggml_cuda_columns_mma_tiles(ncols)) {
        case 1:
            launch_mul_mat_q_repacked<type, 1, nwarps>(ctx, matrices, n, columns, ncols, k, nblocks_max);
            break;
        case 2:
            launch_mul_mat_q_repacked<type, 2, nwarps>(ctx, matrices, n, columns, ncols, k, nblocks_max);
            break;
        case 4:
            launch_mul_mat_q_repacked<type, 4, nwarps>(ctx, matrices, n, columns, ncols, k, nblocks_max);
            break;
        default:
            launch_mul_mat_q_repacked<type, 8, nwarps>(ctx, matrices, n, columns, ncols, k, nblocks_max);
            break;
    }
}

// As many blocks of mul_mat_q_repacked as multiprocessors have shared memory for, with any number of columns
static int mmq_repacked_blocks(const int device) {
    const auto & d = ggml_cuda_info().devices[device];
    return (d.smpbo >= 224 * 1024 ? 3 : d.smpbo >= 160 * 1024 ? 2 : 1) * d.nsm;
}

// false: there is no room for the columns and what the units give
template <ggml_type type, int NC>
static bool launch_mul_mat_q_repacked_few(ggml_backend_cuda_context & ctx, mmq_repacked_few_params p) {
    constexpr int unit = mmq_repacked_unit(type), results = mmq_repacked_few_results(type, NC);
    const int     nblocks = std::min(ggml_cuda_info().devices[ctx.device].nsm, p.nrows);
    const int     rows    = (p.nrows + nblocks - 1) / nblocks; // of a block, 16 each
    const int     once    = std::max(1, 24 * 1024 / (p.ks * results));
    p.buffers             = rows <= once ? 1 : 2;
    p.batch               = rows <= once ? rows : std::max(1, once / 2);
    const int fixed       = p.ks * NC * (512 + (mmq_repacked_has_mins(type) ? 32 : 0)) + p.buffers * p.batch * p.ks * results;
    const int ring        = std::max(MMQ_REPACKED_FEW_SMEM - fixed, std::min(MMQ_REPACKED_FEW_SMEM_MAX - fixed, 2 * unit * MMQ_REPACKED_FEW_WARPS));
    const int units       = (rows * p.ks + MMQ_REPACKED_FEW_WARPS - 1) / MMQ_REPACKED_FEW_WARPS;
    p.nstages             = std::min({ MMQ_REPACKED_FEW_MAX_STAGES, units, ring / (unit * MMQ_REPACKED_FEW_WARPS) });
    if (p.nstages < 1) { return false; }
    const size_t smem = MMQ_REPACKED_FEW_WARPS * p.nstages * unit + fixed;
    CUDA_SET_SHARED_MEMORY_LIMIT((mul_mat_q_repacked_few<type, NC>), MMQ_REPACKED_FEW_SMEM_MAX);
    const ggml_cuda_kernel_launch_params launch_params(dim3(nblocks), dim3(32 * MMQ_REPACKED_FEW_WARPS), smem, ctx.stream());
    ggml_cuda_kernel_launch(mul_mat_q_repacked_few<type, NC>, launch_params, p);
    return true;
}

static bool ggml_cuda_mul_mat_q_repacked_few(ggml_backend_cuda_context & ctx, const mmq_repacked_matrix * matrices, const int n, const ggml_type type,
        const void * columns, const int64_t ncols, const int64_t k) {
    static const char * env_c    = getenv("GGML_CUDA_MMQ_REPACKED_FEW_MAX");
    static const int    max_cols = env_c ? std::min(atoi(env_c), 16) : 16;
    const auto &        device   = ggml_cuda_info().devices[ctx.device];
    if (ncols > max_cols || type == GGML_TYPE_Q8_0 || device.cc != GGML_CUDA_CC_HOPPER || device.smpbo < 224 * 1024 ||
            ggml_cuda_highest_compiled_arch(device.cc) < GGML_CUDA_CC_HOPPER) {
        return false;
    }
    constexpr int           nwarps = 4; // of mul_mat_q_repacked
    mmq_repacked_few_params p      = {};
    int                     tiles  = 0;
    for (int i = 0; i < MMQ_REPACKED_MAX_MATRICES; ++i) {
        const mmq_repacked_matrix & matrix = matrices[i < n ? i : 0];
        p.rows[i]                          = (const char *) matrix.rows;
        p.dst[i]                           = matrix.dst;
        p.first_tile[i]                    = tiles;
        if (i < n) {
            tiles += (matrix.nrows / 16 + nwarps - 1) / nwarps;
            p.nrows += matrix.nrows / 16;
        }
        p.row_end[i] = p.nrows;
    }
    const int nblocks = mmq_repacked_blocks(ctx.device);
    p.columns         = (const char *) columns;
    p.sums            = (const char *) columns + k / 32 * ggml_cuda_columns_mma_tiles(ncols) * 512;
    p.ks              = k / 256;
    p.ncols           = ncols;
    p.iters           = (tiles * p.ks + nblocks - 1) / nblocks;
    p.nwarps          = nwarps;
    bool done         = false;
    mmq_repacked_switch_type(type, [&](auto t) {
        if constexpr (t.value != GGML_TYPE_Q8_0) {
            done = ncols == 1 ? launch_mul_mat_q_repacked_few<t.value, 1>(ctx, p) :
                   ncols == 2 ? launch_mul_mat_q_repacked_few<t.value, 2>(ctx, p) :
                   ncols <= 4 ? launch_mul_mat_q_repacked_few<t.value, 4>(ctx, p) :
                   ncols <= 8 ? launch_mul_mat_q_repacked_few<t.value, 8>(ctx, p) :
                                launch_mul_mat_q_repacked_few<t.value, 16>(ctx, p);
        }
    });
    return done;
}

void ggml_cuda_mul_mat_q_repacked(ggml_backend_cuda_context & ctx, const mmq_repacked_matrix * matrices, const int n, const ggml_type type,
        const void * columns, const int64_t ncols, const int64_t k) {
    GGML_ASSERT(n <= MMQ_REPACKED_MAX_MATRICES && ncols <= MMQ_REPACKED_MAX_COLUMNS && (uintptr_t) columns % 16 == 0);
    if (ggml_cuda_mul_mat_q_repacked_few(ctx, matrices, n, type, columns, ncols, k)) { return; }
    const int nblocks = mmq_repacked_blocks(ctx.device);
    mmq_repacked_switch_type(type, [&](auto t) {
        if (ggml_cuda_info().devices[ctx.device].smpbo >= 160 * 1024) {
            mul_mat_q_repacked_switch_ncols<t.value, 4>(ctx, matrices, n, columns, ncols, k, nblocks);
        } else {
            mul_mat_q_repacked_switch_ncols<t.value, 8>(ctx, matrices, n, columns, ncols, k, nblocks);
        }
    });
}
