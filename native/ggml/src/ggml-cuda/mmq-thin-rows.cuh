#pragma once

#include "common.cuh"

// Rows of a quantized matrix in the registers of mma.sync, for mmq-thin.cu and mmq-mid.cu.

// C += A*B for int8, 16x32 and 32x8; lane = 4*g + t holds rows g, g + 8 of A and column g of B, columns 2*t, 2*t + 1 of C
static __device__ __forceinline__ void mmq_thin_mma_k32(int (&c)[4], const int (&a)[4], const int (&b)[2]) {
#ifdef AMPERE_MMA_AVAILABLE
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    GGML_UNUSED_VARS(c, a, b);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

static __device__ __forceinline__ void mmq_thin_mma_k16(int (&c)[4], const int (&a)[2], const int b) {
#ifdef AMPERE_MMA_AVAILABLE
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(b));
#else
    GGML_UNUSED_VARS(c, a, b);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

static __device__ __forceinline__ int mmq_thin_load_b2(const uint8_t * x) { // 4 bytes, aligned to 2
    const uint16_t * x16 = (const uint16_t *) x;
    return x16[0] | (x16[1] << 16);
}

// Quants and scales of a super-block for one row. A thread has those of its rows, 8 bytes of each sub-block of 32.
template <ggml_type type>
struct mmq_thin_row;

// 8 sub-blocks of 32 with scale and minimum
template <>
struct mmq_thin_row<GGML_TYPE_Q4_K> {
    static constexpr int  size    = sizeof(block_q4_K);
    static constexpr bool has_min = true;

    int4 head; // d, dmin, scales
    int2 qs[4];

    __device__ __forceinline__ void load(const uint8_t * x, const int t) {
        head = *(const int4 *) x;
#pragma unroll
        for (int j = 0; j < 4; ++j) { qs[j] = *(const int2 *) (x + 16 + 32 * j + 8 * t); }
    }

    __device__ __forceinline__ int2 get(const int s) const {
        const int shift = 4 * (s % 2);
        return make_int2((qs[s / 2].x >> shift) & 0x0F0F0F0F, (qs[s / 2].y >> shift) & 0x0F0F0F0F);
    }
};

template <>
struct mmq_thin_row<GGML_TYPE_Q5_K> {
    static constexpr int  size    = sizeof(block_q5_K);
    static constexpr bool has_min = true;

    int4 head;
    int2 qh;
    int2 qs[4];

    __device__ __forceinline__ void load(const uint8_t * x, const int t) {
        head = *(const int4 *) x;
        qh   = *(const int2 *) (x + 16 + 8 * t);
#pragma unroll
        for (int j = 0; j < 4; ++j) { qs[j] = *(const int2 *) (x + 48 + 32 * j + 8 * t); }
    }

    __device__ __forceinline__ int2 get(const int s) const {
        const int shift = 4 * (s % 2);
        return make_int2(((qs[s / 2].x >> shift) & 0x0F0F0F0F) | (((qh.x >> s) & 0x01010101) << 4),
                ((qs[s / 2].y >> shift) & 0x0F0F0F0F) | (((qh.y >> s) & 0x01010101) << 4));
    }
};

// scales and minimums of 8 sub-blocks, 6 bits each
static __device__ __forceinline__ void mmq_thin_scales_k4(const int4 & head, int (&sc)[2], int (&mn)[2]) {
    sc[0] = head.y & 0x3F3F3F3F;
    mn[0] = head.z & 0x3F3F3F3F;
    sc[1] = (head.w & 0x0F0F0F0F) | ((head.y >> 2) & 0x30303030);
    mn[1] = ((head.w >> 4) & 0x0F0F0F0F) | ((head.z >> 2) & 0x30303030);
}

// 16 sub-blocks of 16 with scale
template <>
struct mmq_thin_row<GGML_TYPE_Q6_K> {
    static constexpr int  size    = sizeof(block_q6_K);
    static constexpr bool has_min = false;

    int   ql[2][2][2]; // half of the super-block, 32 bytes of it, 16 bytes of these
    int   qh[2][2];
    int   sc[4];
    float d;

    // note: the size of a super-block is a multiple of 2 only
    __device__ __forceinline__ void load(const uint8_t * x, const int t) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                ql[n][0][h] = mmq_thin_load_b2(x + 64 * n + 16 * h + 4 * t);
                ql[n][1][h] = mmq_thin_load_b2(x + 64 * n + 32 + 16 * h + 4 * t);
                qh[n][h]    = mmq_thin_load_b2(x + 128 + 32 * n + 16 * h + 4 * t);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) { sc[i] = mmq_thin_load_b2(x + 192 + 4 * i); }
        d = __half2float(*(const half *) (x + 208));
    }

    // sub-block s = 8*n + 2*m + h: values 128*n + 32*m + 16*h ...
    __device__ __forceinline__ int get(const int s) const {
        const int n  = s / 8;
        const int m  = s % 8 / 2;
        const int h  = s % 2;
        const int lo = (ql[n][m % 2][h] >> (4 * (m / 2))) & 0x0F0F0F0F;
        const int hi = ((qh[n][h] >> (2 * m)) & 0x03030303) << 4;
        return (((lo | hi | 0x80808080) - 0x20202020) ^ 0x80808080); // q - 32 without carries between bytes
    }

    __device__ __forceinline__ float scale(const int s) const { return d * (int8_t) (sc[s / 4] >> (8 * (s % 4))); }
};
