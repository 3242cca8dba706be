#include "mmq-grouped.cuh"
#include "bulk-copy.cuh"
#include "cp-async.cuh"
#include "mmf-grouped.cuh"

#include <type_traits>

#define MMQ_GROUPED_MAX_PAIRS 1024
#define MMQ_GROUPED_STAGES    3

// A warp has nb times 256 weights of a row. With fewer it needs fewer registers, so that an SM has more warps, but more of them share a row.
template <ggml_type type, bool glu>
static constexpr int mmq_grouped_nb = type == GGML_TYPE_Q4_K && glu ? 1 : 2;
template <int nb>
static constexpr int mmq_grouped_warps = nb == 1 ? 8 : 4; // of a block

// bytes of the weights of a row, and between rows in shared memory: there the same bytes of four rows are in different banks
template <ggml_type type, int nb>
static constexpr int mmq_grouped_nbytes = nb * (type == GGML_TYPE_Q4_K ? 144 : 210);
template <ggml_type type, int nb>
static constexpr int mmq_grouped_stride = type == GGML_TYPE_Q4_K && nb == 1 ? 160 : mmq_grouped_nbytes<type, nb>;

static __device__ __forceinline__ void mmq_grouped_mma(
        float (&c)[4], const uint32_t a0, const uint32_t a1, const uint32_t a2, const uint32_t a3, const uint32_t b0, const uint32_t b1) {
#ifdef AMPERE_MMA_AVAILABLE
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    GGML_UNUSED_VARS(c, a0, a1, a2, a3, b0, b1);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

template <int n>
static __device__ __forceinline__ void mmq_grouped_copy(void * dst, const void * src) {
#ifdef CP_ASYNC_AVAILABLE
    if constexpr (n == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(ggml_cuda_cvta_generic_to_shared(dst)), "l"(src) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(ggml_cuda_cvta_generic_to_shared(dst)), "l"(src) : "memory");
    }
#else
    GGML_UNUSED_VARS(dst, src);
    NO_DEVICE_CODE;
#endif // CP_ASYNC_AVAILABLE
}

static __device__ __forceinline__ uint32_t mmq_grouped_bits(const half2 x) { return *(const uint32_t *) &x; }

static __device__ __forceinline__ half2 mmq_grouped_half2(const uint32_t x) { return *(const half2 *) &x; }

// Eight values of a column as FP16, those of 0 and 2, 1 and 3, 4 and 6, 5 and 7 side by side: in this order nibbles come out of 32 bits.
static __device__ __forceinline__ void mmq_grouped_load_y(uint32_t (&b)[4], const float * y) {
    const float4 v = ((const float4 *) y)[0];
    const float4 w = ((const float4 *) y)[1];
    b[0]           = mmq_grouped_bits(__floats2half2_rn(v.x, v.z));
    b[1]           = mmq_grouped_bits(__floats2half2_rn(v.y, v.w));
    b[2]           = mmq_grouped_bits(__floats2half2_rn(w.x, w.z));
    b[3]           = mmq_grouped_bits(__floats2half2_rn(w.y, w.w));
}

static __device__ __forceinline__ void mmq_grouped_sums(uint32_t (&sums)[4], const uint32_t (&b)[8][4]) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        half2 s[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint32_t * v = b[i + k];
            s[k] = __hadd2(__hadd2(mmq_grouped_half2(v[0]), mmq_grouped_half2(v[1])), __hadd2(mmq_grouped_half2(v[2]), mmq_grouped_half2(v[3])));
        }
        sums[i / 2] = mmq_grouped_bits(__hadd2(__lows2half2(s[0], s[1]), __highs2half2(s[0], s[1])));
    }
}

// acc += 16 rows of 256 weights times 8 columns. block: which 256 of the nb*256 weights of a row.
// b[i] are the lane's values 32*i + 8*t, ..., 32*i + 8*t + 7 of the column lane/4, t = lane % 4, and sums are those of b[0], b[1], ....
// stride: bytes between rows.
template <ggml_type type, int stride>
struct mmq_grouped_dot;

template <int stride>
struct mmq_grouped_dot<GGML_TYPE_Q4_K, stride> {
    static __device__ __forceinline__ void run(
            float (&acc)[4], const char * rows, const int block, const uint32_t (&b)[8][4], const uint32_t (&sums)[4], const int lane) {
        const int    g = lane / 4, t = lane % 4;
        const char * x = rows + g * stride + block * 144;

        half2    dm[2];
        uint32_t sc[2][2], mn[2][2]; // one byte each
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint4 h = *(const uint4 *) (x + 8 * r * stride);
            dm[r]         = mmq_grouped_half2(h.x);
            sc[r][0]      = h.y & 0x3F3F3F3F;
            mn[r][0]      = h.z & 0x3F3F3F3F;
            sc[r][1]      = (h.w & 0x0F0F0F0F) | ((h.y >> 2) & 0x30303030);
            mn[r][1]      = ((h.w >> 4) & 0x0F0F0F0F) | ((h.z >> 2) & 0x30303030);
        }
        // Nibbles are subnormal FP16, n*2^-24 and 16*n*2^-24: products are exact, and FP32 has the scales.
        float d[2][2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            d[r][0] = __low2float(dm[r]) * 16777216.0f;
            d[r][1] = d[r][0] * 0.0625f;
        }
        const auto scale = [&](const int r, const int j, const int hi) { // the byte as the low bits of 2^23, minus that
            const float s = __uint_as_float(__byte_perm(sc[r][j / 2], 0x4B000000, 0x7440 + 2 * (j % 2) + hi));
            return fmaf(s, d[r][hi], -8388608.0f * d[r][hi]);
        };
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint2 q[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) { q[r] = *(const uint2 *) (x + 8 * r * stride + 16 + 32 * j + 8 * t); }
#pragma unroll
            for (int hi = 0; hi < 2; ++hi) {
                const uint32_t mask = hi ? 0x00F000F0 : 0x000F000F;
                float          c[4] = {};
                mmq_grouped_mma(c, q[0].x & mask, q[1].x & mask, q[0].x >> 8 & mask, q[1].x >> 8 & mask, b[2 * j + hi][0], b[2 * j + hi][1]);
                mmq_grouped_mma(c, q[0].y & mask, q[1].y & mask, q[0].y >> 8 & mask, q[1].y >> 8 & mask, b[2 * j + hi][2], b[2 * j + hi][3]);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float s = scale(r, j, hi);
                    acc[2 * r] += s * c[2 * r];
                    acc[2 * r + 1] += s * c[2 * r + 1];
                }
            }
        }
        // Minimums times sums: those of the four lanes of a column add up in the product.
        const half2 magic = __float2half2_rn(1024.0f);
        float       m[4]  = {};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            uint32_t a[2][2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                a[r][0] = mmq_grouped_bits(__hsub2(mmq_grouped_half2(__byte_perm(mn[r][j], 0x64646464, 0x4140)), magic));
                a[r][1] = mmq_grouped_bits(__hsub2(mmq_grouped_half2(__byte_perm(mn[r][j], 0x64646464, 0x4342)), magic));
            }
            mmq_grouped_mma(m, a[0][0], a[1][0], a[0][1], a[1][1], sums[2 * j], sums[2 * j + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) { acc[i] -= __high2float(dm[i / 2]) * m[i]; }
    }
};

template <int stride>
struct mmq_grouped_dot<GGML_TYPE_Q6_K, stride> {
    // 8 bytes of which the address is a multiple of 2 (odd) or of 4
    static __device__ __forceinline__ uint2 load8(const char * x, const bool odd) {
        const uint32_t * p = (const uint32_t *) (x - (odd ? 2 : 0));
        if (odd) {
            const uint32_t a = p[0], b = p[1], c = p[2];
            return make_uint2(__byte_perm(a, b, 0x5432), __byte_perm(b, c, 0x5432));
        }
        return make_uint2(p[0], p[1]);
    }

    static __device__ __forceinline__ void run(
            float (&acc)[4], const char * rows, const int block, const uint32_t (&b)[8][4], const uint32_t (&sums)[4], const int lane) {
        const int    g = lane / 4, t = lane % 4;
        const bool   odd = block == 1;
        const char * x   = rows + g * stride + block * 210;
        GGML_UNUSED(sums);

        float c[2][4] = {};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint32_t a[2][4][4]; // row, group of 32
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const char * xr = x + 8 * r * stride;
                const uint2  l0 = load8(xr + 64 * h + 8 * t, odd);
                const uint2  l1 = load8(xr + 64 * h + 32 + 8 * t, odd);
                const uint2  hi = load8(xr + 128 + 32 * h + 8 * t, odd);
                const uint2  s8 = load8(xr + 192 + 8 * h, odd);
                // the scales of this lane, each in the byte 2*(group % 2), plus 128
                const uint32_t s01 = (t < 2 ? s8.x : s8.x >> 8) ^ 0x00800080;
                const uint32_t s23 = (t < 2 ? s8.y : s8.y >> 8) ^ 0x00800080;
                half2          s[4];
                s[0] = __hsub2(mmq_grouped_half2(__byte_perm(s01, 0x64646464, 0x4040)), __float2half2_rn(1152.0f));
                s[1] = __hsub2(mmq_grouped_half2(__byte_perm(s01, 0x64646464, 0x4242)), __float2half2_rn(1152.0f));
                s[2] = __hsub2(mmq_grouped_half2(__byte_perm(s23, 0x64646464, 0x4040)), __float2half2_rn(1152.0f));
                s[3] = __hsub2(mmq_grouped_half2(__byte_perm(s23, 0x64646464, 0x4242)), __float2half2_rn(1152.0f));
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const uint32_t va = i == 0 ? l0.x : l0.y, vb = i == 0 ? l1.x : l1.y, u = i == 0 ? hi.x : hi.y;
#pragma unroll
                    for (int k = 0; k < 2; ++k) { // bytes 0 and 2, 1 and 3
                        const uint32_t qa = va >> 8 * k, qb = vb >> 8 * k;
                        // 1,024 + q, or 1,024 + 16*q
                        const uint32_t q0 = (qa & 0x000F000F) | (((k == 0 ? u << 4 : u >> 4) & 0x00300030) | 0x64006400);
                        const uint32_t q1 = (qb & 0x000F000F) | (((k == 0 ? u << 2 : u >> 6) & 0x00300030) | 0x64006400);
                        const uint32_t q2 = (qa & 0x00F000F0) | (((k == 0 ? u << 4 : u >> 4) & 0x03000300) | 0x64006400);
                        const uint32_t q3 = (qb & 0x00F000F0) | (((k == 0 ? u << 2 : u >> 6) & 0x03000300) | 0x64006400);
                        const half2    lo = __float2half2_rn(-1056.0f), hi16 = __float2half2_rn(-96.0f), f = __float2half2_rn(1.0f / 16);
                        a[r][0][2 * i + k] = mmq_grouped_bits(__hmul2(__hadd2(mmq_grouped_half2(q0), lo), s[0]));
                        a[r][1][2 * i + k] = mmq_grouped_bits(__hmul2(__hadd2(mmq_grouped_half2(q1), lo), s[1]));
                        a[r][2][2 * i + k] = mmq_grouped_bits(__hmul2(__hfma2(mmq_grouped_half2(q2), f, hi16), s[2]));
                        a[r][3][2 * i + k] = mmq_grouped_bits(__hmul2(__hfma2(mmq_grouped_half2(q3), f, hi16), s[3]));
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                mmq_grouped_mma(c[i % 2], a[0][i][0], a[1][i][0], a[0][i][1], a[1][i][1], b[4 * h + i][0], b[4 * h + i][1]);
                mmq_grouped_mma(c[i % 2], a[0][i][2], a[1][i][2], a[0][i][3], a[1][i][3], b[4 * h + i][2], b[4 * h + i][3]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float d = __half2float(*(const half *) (x + 8 * r * stride + 208));
            acc[2 * r] += d * (c[0][2 * r] + c[1][2 * r]);
            acc[2 * r + 1] += d * (c[0][2 * r + 1] + c[1][2 * r + 1]);
        }
    }
};

// A warp has nb*256 weights of 32 rows of an expert, with glu of 16 of gate and 16 of up. It requests 16 rows at a time, in a part of shared
// memory that is its own, MMQ_GROUPED_STAGES times before it computes the first of them. threadIdx.y: which weights of a row; threadIdx.z:
// which rows of a tile. A block has some tiles of one expert and all of the expert's columns, eight at a time. With by_pair the block of
// the first pair of an expert has all of its pairs.
template <ggml_type type, bool glu, int nb>
__launch_bounds__(32 * mmq_grouped_warps<nb>, nb == 1 ? 2 : 3) static __global__ void mul_mat_q_grouped(
        const grouped_args p, const bool by_pair, const int tiles, const uint3 n_used_fd) {
    constexpr int           nbytes = mmq_grouped_nbytes<type, nb>;
    constexpr int           stride = mmq_grouped_stride<type, nb>;
    constexpr int           stages = MMQ_GROUPED_STAGES;
    extern __shared__ uint4 smem_mmq_grouped[];
    __shared__ int          n_shared, first_shared;
    __shared__ uint32_t     pairs[MMQ_GROUPED_MAX_PAIRS]; // token, index of the expert in the low 16 bits

    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    const int slices = blockDim.y, slice = threadIdx.y, groups = blockDim.z, warp = threadIdx.z * slices + slice, warps = groups * slices;
    const int tid  = warp * 32 + lane;
    char *    rows = (char *) smem_mmq_grouped + warp * stages * 16 * stride;
    float *   red  = (float *) ((char *) smem_mmq_grouped + warps * stages * 16 * stride); // 2 x warps x 8 x 32

    ggml_cuda_pdl_sync();
    const int n_pairs = p.n_tokens * p.n_used;
    int       expert  = blockIdx.y;
    if (by_pair) {
        const uint2 i = fast_div_modulo(blockIdx.y, n_used_fd);
        expert        = p.ids[i.x * p.si_token + i.y];
    }
    const int    tile_rows = groups * (glu ? 16 : 32);
    int          row0      = blockIdx.x * tiles * tile_rows + threadIdx.z * (glu ? 16 : 32);
    const char * src[2]; // of 16 rows each
    src[0]                  = (const char *) (glu ? p.w_gate : p.w) + expert * p.sw_expert + row0 * p.sw_row + slice * nbytes;
    src[1]                  = (const char *) p.w + expert * p.sw_expert + row0 * p.sw_row + slice * nbytes + (glu ? 0 : 16 * p.sw_row);
    const int64_t next_tile = tile_rows * p.sw_row;

    const auto commit = [&]() {
#ifdef CP_ASYNC_AVAILABLE
        asm volatile("cp.async.commit_group;" : : : "memory");
#endif // CP_ASYNC_AVAILABLE
    };

    // 16 rows; with glu those of gate and of up in turns
    int        to_stage = 0, n_left = 2 * tiles;
    const auto fetch = [&](const int half) {
        if (n_left > 0) {
            --n_left;
            char * to         = rows + to_stage * 16 * stride + lane * 16;
            to_stage          = to_stage == stages - 1 ? 0 : to_stage + 1;
            const char * from = src[half];
            src[half] += next_tile;
            if constexpr (type == GGML_TYPE_Q4_K) {
                constexpr int units = nbytes / 16;
                int           u = lane % units, off = lane / units * int(p.sw_row) + u * 16;
#pragma unroll
                for (int i = 0; i < (16 * units + 31) / 32; ++i) {
                    if (16 * units % 32 == 0 || i * 32 + lane < 16 * units) {
                        mmq_grouped_copy<16>(to + i * 512 + (stride - nbytes) * ((i * 32 + lane) / units), from + off);
                    }
                    u += 32 % units;
                    off += 32 / units * int(p.sw_row) + 32 % units * 16;
                    if (u >= units) {
                        u -= units;
                        off += int(p.sw_row) - units * 16;
                    }
                }
            } else if (slices == 1) {
#pragma unroll
                for (int i = 0; i < 16 * nbytes / 16; i += 32) {
                    if (i + lane < 16 * nbytes / 16) { mmq_grouped_copy<16>(to + i * 16, from + (i + lane) * 16); }
                }
            } else {
                to -= lane * 12;
                for (int i = lane; i < 16 * nbytes / 4; i += 32) {
                    const int row = i / (nbytes / 4), u = i % (nbytes / 4);
                    mmq_grouped_copy<4>(to + (i - lane) * 4, from + row * p.sw_row + u * 4);
                }
            }
        }
        commit();
    };
    const auto first = [&]() {
#pragma unroll
        for (int i = 0; i < stages; ++i) { fetch(i % 2); }
    };
    const bool early = by_pair && p.n_tokens <= 2;
    if (early) { first(); }
    if (tid == 0) {
        n_shared     = 0;
        first_shared = n_pairs;
    }
    __syncthreads();
    for (int i = tid; i < n_pairs; i += 32 * warps) {
        const uint2 j = fast_div_modulo(i, n_used_fd);
        if (p.ids[j.x * p.si_token + j.y] == expert) {
            pairs[atomicAdd(&n_shared, 1)] = j.x << 16 | j.y;
            if (by_pair) { atomicMin(&first_shared, i); }
        }
    }
    __syncthreads();
    const int n = n_shared;
    if (n == 0 || (by_pair && first_shared < int(blockIdx.y))) {
#ifdef CP_ASYNC_AVAILABLE
        asm volatile("cp.async.wait_group 0;" : : : "memory");
#endif // CP_ASYNC_AVAILABLE
        return;
    }
    if (!early) { first(); }
    ggml_cuda_pdl_lc();

    uint32_t   b[nb][8][4], sums[nb][4];
    const auto load_y = [&](const int j0) {
#pragma unroll
        for (int i = 0; i < 8 * nb; ++i) { b[i / 8][i % 8][0] = b[i / 8][i % 8][1] = b[i / 8][i % 8][2] = b[i / 8][i % 8][3] = 0; }
        if (j0 + g < n) {
            const uint32_t pair    = pairs[j0 + g];
            const int      channel = p.n_channels == 1 ? 0 : int(pair & 0xFFFF) % p.n_channels;
            const float *  y       = p.y + int(pair >> 16) * p.sy_token + channel * p.sy_channel + slice * 256 * nb + 8 * t;
#pragma unroll
            for (int i = 0; i < 8 * nb; ++i) { mmq_grouped_load_y(b[i / 8][i % 8], y + 32 * i); }
        }
        if constexpr (type == GGML_TYPE_Q4_K) {
#pragma unroll
            for (int i = 0; i < nb; ++i) { mmq_grouped_sums(sums[i], b[i]); }
        }
    };
    load_y(0);

    int parity = 0, stage = 0;
    for (int tile = 0; tile < tiles; ++tile) {
        const int stage0 = stage, stage1 = stage == stages - 1 ? 0 : stage + 1;
        stage = stage1 == stages - 1 ? 0 : stage1 + 1;
        for (int j0 = 0; j0 < n; j0 += 8) {
            if (n > 8 && (tile > 0 || j0 > 0)) { load_y(j0); }
            float acc[2][4] = {};
            // A stage is free after its last columns. Each has one commit, so that the newest stages - 1 may be on their way.
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                if (j0 == 0) {
#ifdef CP_ASYNC_AVAILABLE
                    asm volatile("cp.async.wait_group %0;" : : "n"(stages - 1) : "memory");
#endif // CP_ASYNC_AVAILABLE
                    __syncwarp();
                }
                const char * x = rows + (m == 0 ? stage0 : stage1) * 16 * stride;
#pragma unroll
                for (int block = 0; block < nb; ++block) { mmq_grouped_dot<type, stride>::run(acc[m], x, block, b[block], sums[block], lane); }
                if (j0 + 8 >= n) {
                    __syncwarp();
                    fetch((stages + m) % 2);
                } else if (j0 == 0) {
                    commit();
                }
            }

            // acc[m][i]: row 16*m + g + 8*(i/2), column 2*t + i%2
            const auto store = [&](const int i, const float v) {
                const int col = 2 * t + i % 2;
                if (j0 + col < n) {
                    const uint32_t pair                                                                                             = pairs[j0 + col];
                    p.dst[int(pair >> 16) * p.sd_token + int(pair & 0xFFFF) * p.sd_channel + row0 + i / 4 * 16 + g + i / 2 % 2 * 8] = v;
                }
            };
            if (slices == 1) {
#pragma unroll
                for (int i = 0; i < (glu ? 4 : 8); ++i) {
                    const float v = acc[i / 4][i % 4];
                    store(i, glu ? v / (1.0f + expf(-v)) * acc[1][i % 4] : v);
                }
            } else {
                float * to = red + ((parity * warps + warp) * 8) * 32 + lane;
#pragma unroll
                for (int i = 0; i < 8; ++i) { to[i * 32] = acc[i / 4][i % 4]; }
                __syncthreads();
                const float * from = red + ((parity * warps + threadIdx.z * slices) * 8) * 32 + lane;
                const auto    sum  = [&](const int i) {
                    float v = 0.0f;
                    for (int s = 0; s < slices; ++s) { v += from[(s * 8 + i) * 32]; }
                    return v;
                };
                // each warp adds some of them
                for (int i = slice; i < (glu ? 4 : 8); i += slices) {
                    const float v = sum(i);
                    store(i, glu ? v / (1.0f + expf(-v)) * sum(i + 4) : v);
                }
                parity ^= 1;
            }
        }
        row0 += tile_rows;
    }
}

// Experts of 8 used ones a token, from gate and up to down, on Hopper: one kernel for gate, up and SiLU (glu), another for down. All blocks are
// resident at once, and each has an equal share of all tiles: some rows of an expert and at most eight of its columns. So an expert with many columns is
// work for more blocks, and columns stay in registers. One warp requests rows by the copy engine, some stages ahead and beyond the end of an
// expert. Eight multiply them, 256 weights of 16 rows at a time. Another adds up what those with parts of the same rows have, so that none of the
// eight waits for the others.
static constexpr int MMQ_STREAM_USED    = 8;
static constexpr int MMQ_STREAM_UP      = 2048; // weights of a row of gate and up
static constexpr int MMQ_STREAM_DOWN    = 512;  // and of down
static constexpr int MMQ_STREAM_WARPS   = 8;    // that multiply
static constexpr int MMQ_STREAM_EXPERTS = 256;  // at most
static constexpr int MMQ_STREAM_JOBS    = 64;   // at most so many experts of a block
static constexpr int MMQ_STREAM_TURN    = 4;    // tiles of rows

struct mmq_stream_args {
    const char *  w; // up or down
    const char *  w_gate;
    int64_t       sw; // bytes between experts
    int64_t       sw_gate;
    const float * x;  // columns of gate and up
    int64_t       sx; // values between tokens
    const int *   ids;
    int64_t       si;
    half *        h;   // of down: pairs x 512, eight values in the order of mmq_grouped_load_y
    float *       dst; // pairs x rows
    int           rows, n_tokens;
};

// A block's tiles of an expert. With more than eight columns an expert's tiles are: MMQ_STREAM_TURN tiles of rows with the first eight columns,
// the same rows with the next eight, and so on until all columns have had them, then the next rows. So only the first eight wait for memory; the others
// find the rows in the L2 cache.
struct mmq_stream_job {
    uint16_t expert;
    uint16_t pair; // its first
    uint16_t n;    // its pairs, which are its columns
    uint16_t first, last;
};

template <ggml_type type, bool glu>
struct mmq_stream_shape {
    static constexpr int    slices = (glu ? MMQ_STREAM_UP : MMQ_STREAM_DOWN) / 256; // warps with parts of the same rows
    static constexpr int    rows   = 16 * MMQ_STREAM_WARPS / slices;                // of a stage and of a tile, with glu of gate and of up
    static constexpr int    parts  = glu ? 2 : 1;                                   // stages of a tile
    static constexpr int    nbytes = slices * mmq_grouped_nbytes<type, 1>;          // of a row
    static constexpr int    stride = glu ? nbytes + 32 : nbytes;                    // the same bytes of four rows are in different banks
    static constexpr int    stages = type == GGML_TYPE_Q4_K ? 5 : 3;
    static constexpr int    stage  = rows * stride;
    static constexpr int    sums   = parts * MMQ_STREAM_WARPS * 4 * 32; // of a tile, for eight columns
    static constexpr size_t smem   = stages * stage + 2 * sums * sizeof(float);
};

template <ggml_type type, bool glu>
__launch_bounds__(32 * (MMQ_STREAM_WARPS + 2), 2) static __global__ void mul_mat_q_stream(const mmq_stream_args p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
    using shape         = mmq_stream_shape<type, glu>;
    constexpr int warps = MMQ_STREAM_WARPS, threads = 32 * (warps + 2), used = MMQ_STREAM_USED, stages = shape::stages, parts = shape::parts;
    constexpr int max_pairs = MMQ_GROUPED_MAX_PAIRS;
    extern __shared__ uint4   smem_mmq_stream[];
    __shared__ uint64_t       barriers[2 * stages + 4];
    __shared__ mmq_stream_job jobs[MMQ_STREAM_JOBS];
    __shared__ uint16_t       pairs[max_pairs]; // by expert
    __shared__ int            n_jobs, scan[warps];

    const int      lane = threadIdx.x, warp = threadIdx.y, tid = 32 * warp + lane, g = lane / 4, t = lane % 4;
    char *         ring      = (char *) smem_mmq_stream;
    float *        red       = (float *) (ring + stages * shape::stage); // two tiles: gate and up, warp, register, lane
    int *          counts    = (int *) red;                              // of pairs of an expert, before there are tiles
    int *          begins    = counts + MMQ_STREAM_EXPERTS;
    const uint32_t full      = ggml_cuda_cvta_generic_to_shared(barriers); // a stage has come
    const uint32_t empty     = full + 8 * stages;                          // and has been read
    const uint32_t sums_full = empty + 8 * stages;
    const uint32_t sums_read = sums_full + 16;

    if (tid == 0) {
        for (int s = 0; s < stages; ++s) {
            bulk_barrier_init(full + 8 * s, 1);
            bulk_barrier_init(empty + 8 * s, warps);
        }
        for (int s = 0; s < 2; ++s) {
            bulk_barrier_init(sums_full + 8 * s, 32 * warps);
            bulk_barrier_init(sums_read + 8 * s, 32);
        }
        bulk_barrier_init_fence();
        n_jobs = 0;
    }
    if (tid < MMQ_STREAM_EXPERTS) { counts[tid] = 0; }
    // Gate and up let down start once ids are there, so down sorts pairs and requests rows before it waits for h.
    if constexpr (glu) { ggml_cuda_pdl_sync(); }
    ggml_cuda_pdl_lc();

    const int n_pairs = p.n_tokens * used;
    int       expert_of[(max_pairs + threads - 1) / threads], place[(max_pairs + threads - 1) / threads];
#pragma unroll
    for (int i = 0; i < (max_pairs + threads - 1) / threads; ++i) {
        const int pair = i * threads + tid;
        expert_of[i]   = pair < n_pairs ? __ldcg(p.ids + pair / used * p.si + pair % used) : 0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < (max_pairs + threads - 1) / threads; ++i) {
        if (i * threads + tid < n_pairs) { place[i] = atomicAdd(&counts[expert_of[i]], 1); }
    }
    __syncthreads();

    // An expert's pairs, and the eights of them. Both are summed in one word.
    int mine = 0, sum = 0;
    if (warp < warps) {
        const int n = counts[tid];
        mine        = n | (n + 7) / 8 << 16;
        sum         = warp_prefix_inclusive_sum<int, 32>(mine);
        if (lane == 31) { scan[warp] = sum; }
    }
    __syncthreads();
    int total = 0;
    sum -= mine;
#pragma unroll
    for (int i = 0; i < warps; ++i) {
        sum += i < warp ? scan[i] : 0;
        total += scan[i];
    }
    if (warp < warps) {
        begins[tid]     = sum & 0xFFFF;
        const int tiles = p.rows / shape::rows, all = (total >> 16) * tiles, n_blocks = gridDim.x, block = blockIdx.x;
        const int at = (sum >> 16) * tiles, many = (mine >> 16) * tiles; // this expert's tiles
        const int first = max(block * all / n_blocks - at, 0), last = min((block + 1) * all / n_blocks - at, many);
        if (first < last) {
            jobs[atomicAdd(&n_jobs, 1)] = { (uint16_t) tid, (uint16_t) (sum & 0xFFFF), (uint16_t) (mine & 0xFFFF), (uint16_t) first,
                (uint16_t) last };
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < (max_pairs + threads - 1) / threads; ++i) {
        if (i * threads + tid < n_pairs) { pairs[begins[expert_of[i]] + place[i]] = i * threads + tid; }
    }
    __syncthreads();
    // All blocks need the same order, because they share an expert's columns.
#pragma unroll
    for (int i = 0; i < (max_pairs + threads - 1) / threads; ++i) {
        if (i * threads + tid < n_pairs) {
            const int expert = expert_of[i];
            place[i]         = 0;
#pragma unroll 4
            for (int k = 0; k < counts[expert]; ++k) { place[i] += pairs[begins[expert] + k] < i * threads + tid; }
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < (max_pairs + threads - 1) / threads; ++i) {
        if (i * threads + tid < n_pairs) { pairs[begins[expert_of[i]] + place[i]] = i * threads + tid; }
    }
    __syncthreads(); // red is free

    int        stage = 0, phase = 0; // of the next stage
    const auto advance = [&]() {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    };
    // f(the job, which rows, where their columns begin, whether the columns are others than those before)
    const auto for_tiles = [&](auto && f) {
        for (int i = 0; i < n_jobs; ++i) {
            const mmq_stream_job job    = jobs[i];
            const int            eights = (job.n + 7) / 8;
            for (int at = job.first; at < job.last; ++at) {
                const int turn = at / MMQ_STREAM_TURN, within = at % MMQ_STREAM_TURN;
                f(job, turn / eights * MMQ_STREAM_TURN + within, turn % eights * 8, at == job.first || (within == 0 && eights > 1));
            }
        }
    };

    if (warp == warps) { // requests rows
        const uint64_t policy_once = bulk_policy_evict_first(), policy_again = bulk_policy_evict_normal();
        for_tiles([&](const mmq_stream_job & job, const int tile, const int j0, const bool fresh) {
            GGML_UNUSED_VARS(j0, fresh);
#pragma unroll
            for (int part = 0; part < parts; ++part) {
                const char *   w    = glu && part == 0 ? p.w_gate + job.expert * p.sw_gate : p.w + job.expert * p.sw;
                const char *   from = w + (int64_t) tile * shape::rows * shape::nbytes;
                const uint32_t to = ggml_cuda_cvta_generic_to_shared(ring) + stage * shape::stage, barrier = full + 8 * stage;
                const uint64_t policy = job.n > 8 ? policy_again : policy_once;
                bulk_barrier_wait(empty + 8 * stage, phase ^ 1);
                if (lane == 0) { bulk_barrier_expect(barrier, shape::rows * shape::nbytes); }
                __syncwarp();
                if constexpr (glu) {
                    if (lane < shape::rows) { bulk_copy(to + lane * shape::stride, from + lane * shape::nbytes, shape::nbytes, barrier, policy); }
                } else if (lane < 4) {
                    bulk_copy(to + lane * (shape::stage / 4), from + lane * (shape::stage / 4), shape::stage / 4, barrier, policy);
                }
                advance();
            }
        });
        return;
    }

    if constexpr (!glu) { ggml_cuda_pdl_sync(); }
    int        buffer = 0, turn = 0; // of red
    const auto advance_sums = [&]() {
        buffer ^= 1;
        turn ^= buffer ^ 1;
    };

    if (warp == warps + 1) { // adds up
        for_tiles([&](const mmq_stream_job & job, const int tile, const int j0, const bool fresh) {
            GGML_UNUSED(fresh);
            bulk_barrier_wait(sums_full + 8 * buffer, turn);
            const float * from = red + buffer * shape::sums + lane;
            // register i of a lane: row g + 8*(i/2), column 2*t + i%2
#pragma unroll
            for (int group = 0; group < warps / shape::slices; ++group) {
                float v[parts][4];
#pragma unroll
                for (int part = 0; part < parts; ++part) {
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        v[part][k] = 0.0f;
#pragma unroll
                        for (int s = 0; s < shape::slices; ++s) { v[part][k] += from[((part * warps + group * shape::slices + s) * 4 + k) * 32]; }
                    }
                }
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int column = j0 + 2 * t + k % 2;
                    if (column < job.n) {
                        const int pair = pairs[job.pair + column];
                        if constexpr (glu) {
                            const int place = (g & 4) | (g & 1) << 1 | (g >> 1 & 1); // of row g among eight
                            p.h[pair * MMQ_STREAM_DOWN + tile * shape::rows + k / 2 * 8 + place] =
                                    __float2half(v[0][k] / (1.0f + expf(-v[0][k])) * v[1][k]);
                        } else {
                            p.dst[(int64_t) pair * p.rows + tile * shape::rows + group * 16 + k / 2 * 8 + g] = v[0][k];
                        }
                    }
                }
            }
            bulk_barrier_arrive(sums_read + 8 * buffer);
            advance_sums();
        });
        return;
    }

    const int slice = warp % shape::slices, group = warp / shape::slices;
    uint32_t  b[8][4], sums[4];
    for_tiles([&](const mmq_stream_job & job, const int tile, const int j0, const bool fresh) {
        GGML_UNUSED(tile);
        if (fresh) {
#pragma unroll
            for (int k = 0; k < 8; ++k) { b[k][0] = b[k][1] = b[k][2] = b[k][3] = 0; }
            if (j0 + g < job.n) {
                const int pair = pairs[job.pair + j0 + g];
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    if constexpr (glu) {
                        mmq_grouped_load_y(b[k], p.x + pair / used * p.sx + slice * 256 + 32 * k + 8 * t);
                    } else {
                        const uint4 v = *(const uint4 *) (p.h + pair * MMQ_STREAM_DOWN + slice * 256 + 32 * k + 8 * t);
                        b[k][0]       = v.x;
                        b[k][1]       = v.y;
                        b[k][2]       = v.z;
                        b[k][3]       = v.w;
                    }
                }
            }
            if constexpr (type == GGML_TYPE_Q4_K) { mmq_grouped_sums(sums, b); }
        }
        bulk_barrier_wait(sums_read + 8 * buffer, turn ^ 1);
#pragma unroll
        for (int part = 0; part < parts; ++part) {
            bulk_barrier_wait(full + 8 * stage, phase);
            const char * x      = ring + stage * shape::stage + group * 16 * shape::stride;
            float        acc[4] = {};
            if (type == GGML_TYPE_Q4_K || slice == 0) { // Q6_K: as constants, since addresses in odd blocks are no multiples of 4
                mmq_grouped_dot<type, shape::stride>::run(acc, x, type == GGML_TYPE_Q4_K ? slice : 0, b, sums, lane);
            } else {
                mmq_grouped_dot<type, shape::stride>::run(acc, x, 1, b, sums, lane);
            }
            float * to = red + buffer * shape::sums + (part * warps + warp) * 4 * 32 + lane;
#pragma unroll
            for (int k = 0; k < 4; ++k) { to[k * 32] = acc[k]; }
            __syncwarp(); // behind the sums, since all that is read of the stage is there then
            if (lane == 0) { bulk_barrier_arrive(empty + 8 * stage); }
            advance();
        }
        bulk_barrier_arrive(sums_full + 8 * buffer);
        advance_sums();
    });
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
}

// 256 weights of 32 rows, those of a warp. load<j> makes FP16 of the weights 64*j, ..., 64*j + 63.
// a: which 16 rows, which 32 weights, which 16 of these, registers of the product
template <ggml_type type>
struct mmq_grouped_rows;

template <>
struct mmq_grouped_rows<GGML_TYPE_Q4_K> {
    static constexpr int stride = 160;
    half2                d[4], m[4];
    uint32_t             sc[4][2], mn[4][2];

    static __device__ __forceinline__ void fetch(
            char * smem, const grouped_args & p, const char * w, const char * w_gate, const bool glu, const int block, const int lane) {
#pragma unroll
        for (int i0 = 0; i0 < 32 * 9; i0 += 32) {
            const int    i = i0 + lane, row = i / 9, u = i % 9;
            const char * from = !glu ? w + row * p.sw_row : row < 16 ? w_gate + row * p.sw_row : w + (row - 16) * p.sw_row;
            mmq_grouped_copy<16>(smem + row * stride + u * 16, from + block * 144 + u * 16);
        }
    }

    __device__ __forceinline__ void begin(const char * smem, const int lane) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const uint4 h = *(const uint4 *) (smem + (8 * r + lane / 4) * stride);
            d[r]          = __low2half2(mmq_grouped_half2(h.x));
            m[r]          = __hneg2(__high2half2(mmq_grouped_half2(h.x)));
            sc[r][0]      = h.y & 0x3F3F3F3F;
            mn[r][0]      = h.z & 0x3F3F3F3F;
            sc[r][1]      = (h.w & 0x0F0F0F0F) | ((h.y >> 2) & 0x30303030);
            mn[r][1]      = ((h.w >> 4) & 0x0F0F0F0F) | ((h.z >> 2) & 0x30303030);
        }
    }

    template <int j>
    __device__ __forceinline__ void load(uint32_t (&a)[2][2][2][4], const char * smem, const int lane) const {
        const half2 magic = __float2half2_rn(1024.0f);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const uint2 q    = *(const uint2 *) (smem + (8 * r + lane / 4) * stride + 16 + 32 * j + 8 * (lane % 4));
            const half2 s_lo = __hsub2(mmq_grouped_half2(__byte_perm(sc[r][j / 2], 0x64646464, j % 2 == 0 ? 0x4040 : 0x4242)), magic);
            const half2 s_hi = __hfma2(mmq_grouped_half2(__byte_perm(sc[r][j / 2], 0x64646464, j % 2 == 0 ? 0x4141 : 0x4343)),
                    __float2half2_rn(1.0f / 16), __float2half2_rn(-64.0f));
            const half2 o_lo = __hmul2(s_lo, __float2half2_rn(-1024.0f));
            const half2 o_hi = __hmul2(s_hi, __float2half2_rn(-1024.0f));
            const half2 m_lo = __hmul2(__hsub2(mmq_grouped_half2(__byte_perm(mn[r][j / 2], 0x64646464, j % 2 == 0 ? 0x4040 : 0x4242)), magic), m[r]);
            const half2 m_hi = __hmul2(__hsub2(mmq_grouped_half2(__byte_perm(mn[r][j / 2], 0x64646464, j % 2 == 0 ? 0x4141 : 0x4343)), magic), m[r]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t v = i == 0 ? q.x : q.y;
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const uint32_t w              = __byte_perm(v, 0, k == 0 ? 0x4140 : 0x4342);
                    const half2    lo             = __hfma2(mmq_grouped_half2((w & 0x000F000F) | 0x64006400), s_lo, o_lo);
                    const half2    hi             = __hfma2(mmq_grouped_half2((w & 0x00F000F0) | 0x64006400), s_hi, o_hi);
                    a[r / 2][0][i][r % 2 + 2 * k] = mmq_grouped_bits(__hfma2(lo, d[r], m_lo));
                    a[r / 2][1][i][r % 2 + 2 * k] = mmq_grouped_bits(__hfma2(hi, d[r], m_hi));
                }
            }
        }
    }
};

template <>
struct mmq_grouped_rows<GGML_TYPE_Q6_K> {
    static constexpr int stride = 212;
    half2                d[4];
    bool                 odd;

    static __device__ __forceinline__ void fetch(
            char * smem, const grouped_args & p, const char * w, const char *, const bool, const int block, const int lane) {
        const int off = block * 210 - block % 2 * 2;
        for (int i = lane; i < 32 * 53; i += 32) {
            const int row = i / 53, u = i % 53;
            mmq_grouped_copy<4>(smem + row * stride + u * 4, w + row * p.sw_row + off + u * 4);
        }
    }

    __device__ __forceinline__ void begin(const char * smem, const int lane, const bool odd_) {
        odd = odd_;
#pragma unroll
        for (int r = 0; r < 4; ++r) { d[r] = __half2half2(*(const half *) (smem + (8 * r + lane / 4) * stride + 2 * odd + 208)); }
    }

    // 8 bytes of which the address is a multiple of 2 (odd) or of 4
    __device__ __forceinline__ uint2 load8(const char * x) const {
        const uint32_t * p = (const uint32_t *) x;
        const uint32_t   a = p[0], b = p[1];
        if (odd) {
            const uint32_t c = p[2];
            return make_uint2(__byte_perm(a, b, 0x5432), __byte_perm(b, c, 0x5432));
        }
        return make_uint2(a, b);
    }

    // j: 128 weights, low or high nibbles
    template <int j>
    __device__ __forceinline__ void load(uint32_t (&a)[2][2][2][4], const char * smem, const int lane) const {
        constexpr int  h    = j / 2;
        constexpr bool high = j % 2 == 1;
        const int      t    = lane % 4;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const char *   xr = smem + (8 * r + lane / 4) * stride;
            const uint2    l0 = load8(xr + 64 * h + 8 * t);
            const uint2    l1 = load8(xr + 64 * h + 32 + 8 * t);
            const uint2    hi = load8(xr + 128 + 32 * h + 8 * t);
            const uint2    s8 = load8(xr + 192 + 8 * h);
            const uint32_t s  = ((high ? s8.y : s8.x) >> (t < 2 ? 0 : 8)) ^ 0x00800080;
            const half2    s0 = __hmul2(__hsub2(mmq_grouped_half2(__byte_perm(s, 0x64646464, 0x4040)), __float2half2_rn(1152.0f)), d[r]);
            const half2    s1 = __hmul2(__hsub2(mmq_grouped_half2(__byte_perm(s, 0x64646464, 0x4242)), __float2half2_rn(1152.0f)), d[r]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t va = i == 0 ? l0.x : l0.y, vb = i == 0 ? l1.x : l1.y, u = i == 0 ? hi.x : hi.y;
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const uint32_t qa = __byte_perm(va, 0, k == 0 ? 0x4140 : 0x4342), qb = __byte_perm(vb, 0, k == 0 ? 0x4140 : 0x4342);
                    const uint32_t w = __byte_perm(u, 0, k == 0 ? 0x4140 : 0x4342);
                    half2          x0, x1;
                    if constexpr (!high) {
                        x0 = __hadd2(mmq_grouped_half2((qa & 0x000F000F) | (((w << 4) & 0x00300030) | 0x64006400)), __float2half2_rn(-1056.0f));
                        x1 = __hadd2(mmq_grouped_half2((qb & 0x000F000F) | (((w << 2) & 0x00300030) | 0x64006400)), __float2half2_rn(-1056.0f));
                    } else {
                        x0 = __hfma2(mmq_grouped_half2((qa & 0x00F000F0) | (((w << 4) & 0x03000300) | 0x64006400)), __float2half2_rn(1.0f / 16),
                                __float2half2_rn(-96.0f));
                        x1 = __hfma2(mmq_grouped_half2((qb & 0x00F000F0) | (((w << 2) & 0x03000300) | 0x64006400)), __float2half2_rn(1.0f / 16),
                                __float2half2_rn(-96.0f));
                    }
                    a[r / 2][0][i][r % 2 + 2 * k] = mmq_grouped_bits(__hmul2(x0, s0));
                    a[r / 2][1][i][r % 2 + 2 * k] = mmq_grouped_bits(__hmul2(x1, s1));
                }
            }
        }
    }
};

// Many tokens: a block has 256 rows of an expert (with glu 128 of gate and 128 of up) and up to 96 of its columns, in steps of 256 weights.
#define MMQ_GROUPED_MANY_COLS 96

template <ggml_type type, bool glu>
__launch_bounds__(256, 1) static __global__ void mul_mat_q_grouped_many(const grouped_args p, const grouped_plan plan, const int k, const int tiles) {
    constexpr int           warps = 8, stride = mmq_grouped_rows<type>::stride;
    constexpr int           nbytes_rows = warps * 32 * stride, nbytes = nbytes_rows + MMQ_GROUPED_MANY_COLS * 512;
    extern __shared__ uint4 smem_mmq_grouped[];
    __shared__ int          y_of[MMQ_GROUPED_MANY_COLS]; // where a column is
    __shared__ int64_t      dst_of[MMQ_GROUPED_MANY_COLS];
    char *                  smem = (char *) smem_mmq_grouped;

    if (int(blockIdx.y) >= *plan.n_tiles) { return; }
    const int4    tile = plan.tiles[blockIdx.y];
    const int     lane = threadIdx.x, warp = threadIdx.y, tid = 32 * warp + lane, g = lane / 4, t = lane % 4;
    constexpr int tile_rows = warps * (glu ? 16 : 32);
    int           row0      = blockIdx.x * tiles * tile_rows + warp * (glu ? 16 : 32);
    if (tid < tile.z) {
        const int pair = plan.pairs[tile.y + tid], token = pair / p.n_used, i = pair - token * p.n_used;
        y_of[tid]   = (token * p.n_channels + i % p.n_channels) * k;
        dst_of[tid] = token * p.sd_token + i * p.sd_channel;
    }
    __syncthreads();

    // With 512 weights a row both halves of the columns stay, and only rows are fetched for the tiles of rows after the first.
    const int    steps = k / 256, all = steps * tiles;
    const char * w      = (const char *) p.w + tile.x * p.sw_expert + row0 * p.sw_row;
    const char * w_gate = (const char *) p.w_gate + tile.x * p.sw_expert + row0 * p.sw_row;
    int          next   = 0;
    const auto   fetch  = [&](const int s) {
        char * to = smem + s % 2 * nbytes;
        mmq_grouped_rows<type>::fetch(to + warp * 32 * stride, p, w, w_gate, glu, next, lane);
        to += nbytes_rows;
        // a warp has a column at a time; even and odd columns differ in where 64 bytes lie
        for (int c = s < steps ? warp : tile.z; c < tile.z; c += warps) {
            mmq_grouped_copy<16>(to + c * 512 + (lane ^ (c % 2 * 4)) * 16, (const half *) plan.y + y_of[c] + s * 256 + lane * 8);
        }
        if (++next == steps) {
            next = 0;
            w += tile_rows * p.sw_row;
            w_gate += tile_rows * p.sw_row;
        }
    };
    const auto commit = [&]() {
#ifdef CP_ASYNC_AVAILABLE
        asm volatile("cp.async.commit_group;" : : : "memory");
#endif // CP_ASYNC_AVAILABLE
    };
    fetch(0);
    commit();

    const auto run = [&](auto nt_) {
        constexpr int nt            = decltype(nt_)::value;
        float         acc[2][nt][4] = {};
        for (int s = 0; s < all; ++s) {
            if (s + 1 < all) { fetch(s + 1); }
            commit();
#ifdef CP_ASYNC_AVAILABLE
            asm volatile("cp.async.wait_group 1;" : : : "memory");
#endif // CP_ASYNC_AVAILABLE
            __syncthreads();
            const char *           rows = smem + s % 2 * nbytes + warp * 32 * stride;
            const char *           cols = smem + s % 2 * nbytes + nbytes_rows + g * 512;
            mmq_grouped_rows<type> x;
            if constexpr (type == GGML_TYPE_Q6_K) {
                x.begin(rows, lane, s % 2 == 1);
            } else {
                x.begin(rows, lane);
            }
            const auto part = [&](auto j_) {
                constexpr int j = decltype(j_)::value;
                uint32_t      a[2][2][2][4];
                x.template load<j>(a, rows, lane);
#pragma unroll
                for (int n = 0; n < nt; ++n) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const uint4 b = *(const uint4 *) (cols + n * 8 * 512 + (((2 * j + i) ^ (g % 2)) * 4 + t) * 16);
#pragma unroll
                        for (int m = 0; m < 2; ++m) {
                            mmq_grouped_mma(acc[m][n], a[m][i][0][0], a[m][i][0][1], a[m][i][0][2], a[m][i][0][3], b.x, b.y);
                            mmq_grouped_mma(acc[m][n], a[m][i][1][0], a[m][i][1][1], a[m][i][1][2], a[m][i][1][3], b.z, b.w);
                        }
                    }
                }
            };
            part(std::integral_constant<int, 0>());
            part(std::integral_constant<int, 1>());
            part(std::integral_constant<int, 2>());
            part(std::integral_constant<int, 3>());
            __syncthreads();
            if (s % steps != steps - 1) { continue; }
#pragma unroll
            for (int n = 0; n < nt; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int col = 8 * n + 2 * t + i;
                    if (col < tile.z) {
                        float * dst = p.dst + dst_of[col] + row0 + g;
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            const float v0 = acc[0][n][2 * r + i], v1 = acc[1][n][2 * r + i];
                            if constexpr (glu) {
                                dst[8 * r] = v0 / (1.0f + expf(-v0)) * v1;
                            } else {
                                dst[8 * r]      = v0;
                                dst[8 * r + 16] = v1;
                            }
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) { acc[0][n][i] = acc[1][n][i] = 0.0f; }
            }
            row0 += tile_rows;
        }
    };
    const int nt = (tile.z + 7) / 8;
    if (nt <= 2) {
        run(std::integral_constant<int, 2>());
    } else if (nt <= 4) {
        run(std::integral_constant<int, 4>());
    } else if (nt <= 6) {
        run(std::integral_constant<int, 6>());
    } else if (nt <= 8) {
        run(std::integral_constant<int, 8>());
    } else if (nt <= 10) {
        run(std::integral_constant<int, 10>());
    } else {
        run(std::integral_constant<int, 12>());
    }
}

template <ggml_type type, bool glu>
static void launch_mmq_grouped_few(ggml_backend_cuda_context & ctx, const grouped_args & args) {
    constexpr int nb = mmq_grouped_nb<type, glu>, warps = mmq_grouped_warps<nb>;
    const int     slices = args.k / (256 * nb);
    const int     groups = warps / slices;
    const int     rows   = (glu ? 16 : 32) * groups;

    constexpr size_t nbytes_rows   = warps * MMQ_GROUPED_STAGES * 16 * mmq_grouped_stride<type, nb>;
    constexpr size_t nbytes_sums   = warps * 2 * 8 * 32 * sizeof(float);
    const size_t     nbytes_shared = nbytes_rows + (slices > 1 ? nbytes_sums : 0);
    const int        n_pairs       = args.n_tokens * args.n_used;
    const bool       by_pair       = n_pairs <= args.n_experts;

    // More tiles a block are faster for equal experts, but slower where some have many tokens.
    const int n_tiles = args.rows / rows, n_blocks = n_tiles * std::min(n_pairs, args.n_experts), nsm = ggml_cuda_info().devices[ctx.device].nsm;
    const int tiles = nb == 1 && n_tiles % 4 == 0 && n_blocks >= 8 * nsm ? 4 : n_tiles % 2 == 0 && n_blocks >= 4 * nsm * 7 / 8 ? 2 : 1;

    CUDA_SET_SHARED_MEMORY_LIMIT((mul_mat_q_grouped<type, glu, nb>), nbytes_rows + nbytes_sums);
    const ggml_cuda_kernel_launch_params params(
            dim3(n_tiles / tiles, by_pair ? n_pairs : args.n_experts, 1), dim3(32, slices, groups), nbytes_shared, ctx.stream());
    ggml_cuda_kernel_launch(mul_mat_q_grouped<type, glu, nb>, params, args, by_pair, tiles, init_fastdiv_values(args.n_used));
}

template <ggml_type type, bool glu>
static constexpr size_t mmq_grouped_many_nbytes_shared() {
    return 2 * (8 * 32 * mmq_grouped_rows<type>::stride + MMQ_GROUPED_MANY_COLS * 512);
}

template <ggml_type type, bool glu>
static void launch_mmq_grouped_many(ggml_backend_cuda_context & ctx, const grouped_args & args) {
    const int n_pairs = args.n_tokens * args.n_used;
    const int n_tiles = std::min(n_pairs, args.n_experts) + n_pairs / MMQ_GROUPED_MANY_COLS; // at most

    ggml_cuda_pool_alloc<int4> tiles(ctx.pool(), n_tiles);
    ggml_cuda_pool_alloc<int>  pairs(ctx.pool(), n_pairs + 1);
    ggml_cuda_pool_alloc<half> y(ctx.pool(), (size_t) args.n_tokens * args.n_channels * args.k);
    const grouped_plan         plan = { pairs.ptr + n_pairs, tiles.ptr, pairs.ptr, y.ptr };
    ggml_cuda_grouped_sort_f16(ctx, args, plan, MMQ_GROUPED_MANY_COLS);

    constexpr size_t nbytes_shared = mmq_grouped_many_nbytes_shared<type, glu>();
    CUDA_SET_SHARED_MEMORY_LIMIT((mul_mat_q_grouped_many<type, glu>), nbytes_shared);
    // With 512 weights a row a block has some tiles of rows, so that it fetches its columns once.
    const int row_tiles = args.rows / (glu ? 128 : 256);
    const int per_block = args.k == 512 && row_tiles % 4 == 0 ? 4 : 1;
    mul_mat_q_grouped_many<type, glu>
            <<<dim3(row_tiles / per_block, n_tiles), dim3(32, 8), nbytes_shared, ctx.stream()>>>(args, plan, args.k, per_block);
    CUDA_CHECK(cudaGetLastError());
}

enum mmq_grouped_kernel {
    MMQ_GROUPED_NONE,
    MMQ_GROUPED_FEW,
    MMQ_GROUPED_MANY,
};

static mmq_grouped_kernel mmq_grouped_choose(const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * ids, const int cc) {
    static const char * env_min    = getenv("GGML_CUDA_MMQ_GROUPED_MIN");
    static const char * env_few    = getenv("GGML_CUDA_MMQ_GROUPED_FEW");
    static const char * env_max    = getenv("GGML_CUDA_MMQ_GROUPED_MAX");
    const int64_t       min_tokens = env_min ? std::atoll(env_min) : 8;   // MMVQ is as fast with fewer
    const int64_t       few_tokens = env_few ? std::atoll(env_few) : 128; // here both kernels are as fast
    const int64_t       max_tokens = env_max ? std::atoll(env_max) : INT64_MAX;

    const int64_t slices = src0->ne[0] / 512;
    if (!GGML_CUDA_CC_IS_NVIDIA(cc) || !ampere_mma_available(cc) || ids->ne[1] < min_tokens || ids->ne[1] > max_tokens ||
            (src0->type != GGML_TYPE_Q4_K && src0->type != GGML_TYPE_Q6_K) || src1->type != GGML_TYPE_F32 || src0->ne[0] % 512 != 0 ||
            !ggml_is_contiguous(src0) || (uintptr_t) src0->data % 16 != 0 || src0->ne[3] != 1 || src1->nb[0] != sizeof(float) ||
            src1->nb[1] % 16 != 0 || src1->nb[2] % 16 != 0 || (uintptr_t) src1->data % 16 != 0 || src1->ne[3] != 1 || ids->nb[0] != sizeof(int)) {
        return MMQ_GROUPED_NONE;
    }
    if (ids->ne[1] <= few_tokens && ggml_nelements(ids) <= MMQ_GROUPED_MAX_PAIRS) {
        return slices <= 4 && src0->ne[1] % (32 * (4 / slices)) == 0 && src0->ne[2] <= 65535 ? MMQ_GROUPED_FEW : MMQ_GROUPED_NONE;
    }
    const size_t smpbo = ggml_cuda_info().devices[ggml_cuda_get_device()].smpbo;
    return src0->ne[1] % 256 == 0 && src0->ne[2] <= GROUPED_MAX_EXPERTS && ggml_nelements(src1) <= INT_MAX &&
                           ggml_nelements(ids) / MMQ_GROUPED_MANY_COLS + GROUPED_MAX_EXPERTS <= 65535 &&
                           mmq_grouped_many_nbytes_shared<GGML_TYPE_Q6_K, false>() + 1024 <= smpbo ?
                   MMQ_GROUPED_MANY :
                   MMQ_GROUPED_NONE;
}

void ggml_cuda_mul_mat_q_grouped(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * gate, const ggml_tensor * src1,
        const ggml_tensor * ids, ggml_tensor * dst) {
    grouped_args args;
    args.w          = src0->data;
    args.w_gate     = gate ? gate->data : nullptr;
    args.sw_row     = src0->nb[1]; // here in bytes
    args.sw_expert  = src0->nb[2];
    args.y          = (const float *) src1->data;
    args.sy_channel = src1->nb[1] / sizeof(float);
    args.sy_token   = src1->nb[2] / sizeof(float);
    args.ids        = (const int *) ids->data;
    args.si_token   = ids->nb[1] / sizeof(int);
    args.dst        = (float *) dst->data;
    args.sd_channel = dst->nb[1] / sizeof(float);
    args.sd_token   = dst->nb[2] / sizeof(float);
    args.k          = src0->ne[0];
    args.rows       = src0->ne[1];
    args.n_tokens   = ids->ne[1];
    args.n_used     = ids->ne[0];
    args.n_channels = src1->ne[1];
    args.n_experts  = src0->ne[2];

    const bool few = mmq_grouped_choose(src0, src1, ids, ggml_cuda_info().devices[ctx.device].cc) == MMQ_GROUPED_FEW;
    if (src0->type == GGML_TYPE_Q6_K) {
        GGML_ASSERT(gate == nullptr);
        few ? launch_mmq_grouped_few<GGML_TYPE_Q6_K, false>(ctx, args) : launch_mmq_grouped_many<GGML_TYPE_Q6_K, false>(ctx, args);
    } else if (gate == nullptr) {
        few ? launch_mmq_grouped_few<GGML_TYPE_Q4_K, false>(ctx, args) : launch_mmq_grouped_many<GGML_TYPE_Q4_K, false>(ctx, args);
    } else {
        few ? launch_mmq_grouped_few<GGML_TYPE_Q4_K, true>(ctx, args) : launch_mmq_grouped_many<GGML_TYPE_Q4_K, true>(ctx, args);
    }
}

bool ggml_cuda_should_use_mmq_grouped(const ggml_tensor * dst, const int cc) {
    return dst->type == GGML_TYPE_F32 && dst->nb[0] == sizeof(float) &&
           mmq_grouped_choose(dst->src[0], dst->src[1], dst->src[2], cc) != MMQ_GROUPED_NONE;
}

bool ggml_cuda_can_fuse_mmq_grouped(const ggml_tensor * up, const ggml_tensor * gate, const ggml_tensor * glu, const int cc) {
    return up->op == GGML_OP_MUL_MAT_ID && ggml_get_glu_op(glu) == GGML_GLU_OP_SWIGLU && up->src[0]->type == GGML_TYPE_Q4_K &&
           gate->src[0]->type == GGML_TYPE_Q4_K && ggml_cuda_should_use_mmq_grouped(up, cc) && ggml_cuda_should_use_mmq_grouped(gate, cc);
}

static bool mmq_stream_is_matrix(const ggml_tensor * w, const int64_t k) {
    return w->ne[0] == k && w->ne[3] == 1 && ggml_is_contiguous(w) && (uintptr_t) w->data % 16 == 0;
}

bool ggml_cuda_can_fuse_mmq_stream(
        const ggml_tensor * gate, const ggml_tensor * up, const ggml_tensor * glu, const ggml_tensor * down, const int cc) {
    static const char * env_min    = getenv("GGML_CUDA_MMQ_STREAM_MIN");
    static const char * env_max    = getenv("GGML_CUDA_MMQ_STREAM_MAX");
    const int64_t       min_tokens = env_min ? std::atoll(env_min) : 8;
    const int64_t       max_tokens = env_max ? std::atoll(env_max) : 128;

    const ggml_tensor * x    = up->src[1];
    const ggml_tensor * ids  = up->src[2];
    const int64_t       rows = down->src[0]->ne[1];
    return cc == GGML_CUDA_CC_HOPPER && ggml_cuda_highest_compiled_arch(cc) >= GGML_CUDA_CC_HOPPER && ids->ne[1] >= min_tokens &&
           ids->ne[1] <= std::min<int64_t>(max_tokens, MMQ_GROUPED_MAX_PAIRS / MMQ_STREAM_USED) && !ggml_is_batch_invariant(gate) &&
           !ggml_is_batch_invariant(up) && !ggml_is_batch_invariant(down) && glu->src[0] == gate && glu->src[1] == up && down->src[1] == glu &&
           ggml_get_glu_op(glu) == GGML_GLU_OP_SWIGLU && gate->src[1] == x && gate->src[2] == ids && down->src[2] == ids &&
           gate->src[0]->type == GGML_TYPE_Q4_K && up->src[0]->type == GGML_TYPE_Q4_K &&
           (down->src[0]->type == GGML_TYPE_Q4_K || down->src[0]->type == GGML_TYPE_Q6_K) && mmq_stream_is_matrix(gate->src[0], MMQ_STREAM_UP) &&
           mmq_stream_is_matrix(up->src[0], MMQ_STREAM_UP) && mmq_stream_is_matrix(down->src[0], MMQ_STREAM_DOWN) &&
           gate->src[0]->ne[1] == MMQ_STREAM_DOWN && up->src[0]->ne[1] == MMQ_STREAM_DOWN && down->src[0]->ne[2] <= MMQ_STREAM_EXPERTS &&
           rows % (MMQ_STREAM_TURN * mmq_stream_shape<GGML_TYPE_Q4_K, false>::rows) == 0 &&
           rows / mmq_stream_shape<GGML_TYPE_Q4_K, false>::rows <= 255 &&
           MMQ_STREAM_EXPERTS + MMQ_GROUPED_MAX_PAIRS / 8 <= 2 * ggml_cuda_info().devices[ggml_cuda_get_device()].nsm * (MMQ_STREAM_JOBS - 2) &&
           ids->ne[0] == MMQ_STREAM_USED && ids->nb[0] == sizeof(int) && ids->ne[2] * ids->ne[3] == 1 && x->type == GGML_TYPE_F32 &&
           x->nb[0] == sizeof(float) && x->ne[1] == 1 && x->ne[3] == 1 && x->nb[2] % 16 == 0 && (uintptr_t) x->data % 16 == 0 &&
           down->type == GGML_TYPE_F32 && ggml_is_contiguous(down);
}

template <ggml_type type, bool glu>
static void launch_mmq_stream(const mmq_stream_args & args, const int nsm, cudaStream_t stream) {
    constexpr size_t smem = mmq_stream_shape<type, glu>::smem;
    CUDA_SET_SHARED_MEMORY_LIMIT((mul_mat_q_stream<type, glu>), smem);
    const ggml_cuda_kernel_launch_params params(dim3(2 * nsm), dim3(32, MMQ_STREAM_WARPS + 2), smem, stream);
    ggml_cuda_kernel_launch(mul_mat_q_stream<type, glu>, params, args);
}

void ggml_cuda_mul_mat_q_stream(ggml_backend_cuda_context & ctx, const ggml_tensor * gate, const ggml_tensor * up, ggml_tensor * down) {
    const ggml_tensor *        x   = up->src[1];
    const ggml_tensor *        ids = up->src[2];
    ggml_cuda_pool_alloc<half> h(ctx.pool(), ggml_nelements(ids) * MMQ_STREAM_DOWN);

    mmq_stream_args args{};
    args.w        = (const char *) up->src[0]->data;
    args.sw       = up->src[0]->nb[2];
    args.w_gate   = (const char *) gate->src[0]->data;
    args.sw_gate  = gate->src[0]->nb[2];
    args.x        = (const float *) x->data;
    args.sx       = x->nb[2] / sizeof(float);
    args.ids      = (const int *) ids->data;
    args.si       = ids->nb[1] / sizeof(int);
    args.h        = h.get();
    args.rows     = MMQ_STREAM_DOWN;
    args.n_tokens = ids->ne[1];

    const int nsm = ggml_cuda_info().devices[ctx.device].nsm;
    launch_mmq_stream<GGML_TYPE_Q4_K, true>(args, nsm, ctx.stream());
    args.w    = (const char *) down->src[0]->data;
    args.sw   = down->src[0]->nb[2];
    args.dst  = (float *) down->data;
    args.rows = down->src[0]->ne[1];
    if (down->src[0]->type == GGML_TYPE_Q6_K) {
        launch_mmq_stream<GGML_TYPE_Q6_K, false>(args, nsm, ctx.stream());
    } else {
        launch_mmq_stream<GGML_TYPE_Q4_K, false>(args, nsm, ctx.stream());
    }
}
