#include "mmq-mid.cuh"
#include "mmq-thin-rows.cuh"
#include "cp-async.cuh"

#include <climits>

// Products of a quantized matrix with 17 to 64 columns on tensor cores.
//
// A warp has 16 rows of the matrix and all columns. It loads quants straight into the registers where mma.sync wants them,
// as in mmq-thin.cu; the columns come through shared memory. R warps of a block have different rows, G groups of R warps share
// the super-blocks of these rows. Matrices with few rows are also split among blocks, the last one to finish adds up
// the sums of all of them in order.
//
// What costs is the work per value of the result, once for each 32 values of a row. It is two FFMA here:
//   - The sums of mma.sync begin at a number whose bits, read as a float, are 1.5*2^23: the bits of the result are the float
//     1.5*2^23 + sum, there is no conversion. The scale of a column has two bits less than a float, so that its product with
//     1.5*2^23 is exact and fma(bits, scale, -1.5*2^23*scale) is scale*sum, rounded once.
//   - The minimums (integers up to 63) are multiplied with the sums of the columns (half, as in block_q8_1_mmq) by a second
//     mma.sync for each super-block. These products are exact, too.

#define MMQ_MID_MAGIC_BITS 0x4B400000
#define MMQ_MID_MAGIC      12582912.0f // 1.5*2^23

// A column's part of a super-block in shared memory: 256 quants, 8 sums as half. 16 bytes more than a power of 2: no bank conflicts.
#define MMQ_MID_COL_BYTES (QK_K + 8 * sizeof(half))
// and 8 times the scale and -1.5*2^23 times the scale, those of all columns for one sub-block together
static constexpr __host__ __device__ int mmq_mid_y_bytes(const int ncols_padded) { return ncols_padded * (MMQ_MID_COL_BYTES + 8 * sizeof(float2)); }

#define MMQ_MID_MAX_WARPS    16
#define MMQ_MID_MAX_COUNTERS 1024 // blocks with different rows, if others share the rows

// Columns to int8. permuted: in a sub-block of 32, those 8 consecutive values that a thread of mmq_thin_row has (int2)
//     are where a thread's two operands of m16n8k32 are.
template <bool permuted>
static __global__ void __launch_bounds__(256) quantize_mmq_mid(
        const float * x, char * y, const int64_t stride_col, const int ncols, const int ncols_padded) {
    ggml_cuda_pdl_lc();
    const int u   = blockIdx.x;
    const int col = blockIdx.y * blockDim.y + threadIdx.y;
    const int i   = threadIdx.x; // 4 values
    char *    yu  = y + (int64_t) u * mmq_mid_y_bytes(ncols_padded);

    ggml_cuda_pdl_sync();

    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (col < ncols) { v = *(const float4 *) (x + col * stride_col + u * QK_K + 4 * i); }
    float amax = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) { amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, offset)); }

    const float d     = __int_as_float(__float_as_int(amax / 127.0f) & ~3);
    const float d_inv = d > 0.0f ? 1.0f / d : 0.0f;
    char4       q;
    q.x = (int8_t) roundf(fminf(fmaxf(v.x * d_inv, -127.0f), 127.0f));
    q.y = (int8_t) roundf(fminf(fmaxf(v.y * d_inv, -127.0f), 127.0f));
    q.z = (int8_t) roundf(fminf(fmaxf(v.z * d_inv, -127.0f), 127.0f));
    q.w = (int8_t) roundf(fminf(fmaxf(v.w * d_inv, -127.0f), 127.0f));

    // the sum of the quants, as on the CPU: what is lost in them is not multiplied by the minimums then
    int sum = q.x + q.y + q.z + q.w;
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) { sum += __shfl_xor_sync(0xFFFFFFFF, sum, offset); }

    char *    yc                                                      = yu + col * MMQ_MID_COL_BYTES;
    const int s                                                       = i / 8;
    const int j                                                       = i % 8;
    *(char4 *) (yc + 32 * s + 4 * (permuted ? j % 2 * 4 + j / 2 : j)) = q;
    if (j == 0) {
        ((half *) (yc + QK_K))[s]                                                    = __float2half(d * sum);
        ((float2 *) (yu + ncols_padded * MMQ_MID_COL_BYTES))[s * ncols_padded + col] = make_float2(d, -MMQ_MID_MAGIC * d);
    }
}

#ifdef AMPERE_MMA_AVAILABLE

// C = A*B + MMQ_MID_MAGIC_BITS
static __device__ __forceinline__ void mmq_mid_mma_k32(int (&c)[4], const int (&a)[4], const int b0, const int b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(MMQ_MID_MAGIC_BITS));
}

static __device__ __forceinline__ void mmq_mid_mma_k16(int (&c)[4], const int (&a)[2], const int b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(b), "r"(MMQ_MID_MAGIC_BITS));
}

// C = A*B for half, 16x8 and 8x8
static __device__ __forceinline__ void mmq_mid_mma_f16(float (&c)[4], const int (&a)[2], const int b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
            : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(b), "f"(0.0f));
}

// 8 columns, 64 bytes of each: the columns' operands of two k32 or of four k16
static __device__ __forceinline__ void mmq_mid_load_b(int (&b)[4], const char * y) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
            : "r"((unsigned int) __cvta_generic_to_shared(y)));
}

static __device__ __forceinline__ void mmq_mid_prefetch(const void * x) { asm volatile("prefetch.global.L2 [%0];" : : "l"(x)); }

// byte i of x as 2^23 + byte
static __device__ __forceinline__ float mmq_mid_byte(const int x, const int i) { return __int_as_float(__byte_perm(x, 0x4B000000, 0x7440 | i)); }

// bytes 0 and 1 of x as half2
static __device__ __forceinline__ int mmq_mid_bytes_half(const int x) {
    const int   magic = 0x64006400; // 1024
    const int   bits  = __byte_perm(x, 0x64646464, 0x4140);
    const half2 h     = __hsub2(*(const half2 *) &bits, *(const half2 *) &magic);
    return *(const int *) &h;
}

#endif // AMPERE_MMA_AVAILABLE

// nt: tiles of 8 columns
template <ggml_type type, int nt>
static __global__ void __launch_bounds__(32 * MMQ_MID_MAX_WARPS, 1) mul_mat_q_mid(const uint8_t * x, const char * y, float * dst, float4 * partial,
        int * counters, const int nrows, const int nsuper, const int64_t stride_row, const int ncols, const int64_t stride_dst, const int nwarps_row,
        const int ngroups) {
#ifdef AMPERE_MMA_AVAILABLE
    using row_t                = mmq_thin_row<type>;
    constexpr int ncols_padded = 8 * nt;
    constexpr int y_bytes      = mmq_mid_y_bytes(ncols_padded);
    // With few columns there are registers for the next super-block of a row, with many it is only brought to the L2 cache.
    constexpr bool ahead = nt <= 4;

    extern __shared__ __align__(16) char mmq_mid_smem[];

    const int lane    = threadIdx.x;
    const int warp    = threadIdx.y;
    const int g       = lane / 4;
    const int t       = lane % 4;
    const int group   = warp / nwarps_row;
    const int row0    = (blockIdx.x * nwarps_row + warp % nwarps_row) * 16;
    const int nsplits = gridDim.y;

    const int u_begin = (int64_t) nsuper * blockIdx.y / nsplits;
    const int u_end   = (int64_t) nsuper * (blockIdx.y + 1) / nsplits;
    const int nrounds = (u_end - u_begin + ngroups - 1) / ngroups;

    // Rows that are not there are the last one again, nothing is written for them.
    const uint8_t * x_row[2];
    row_t           row[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        x_row[i] = x + min(row0 + 8 * i + g, nrows - 1) * stride_row;
        if (ahead && u_begin + group < u_end) { row[i].load(x_row[i] + (u_begin + group) * row_t::size, t); }
    }

    // a lane's half of a row's super-block
    const uint8_t * x_next = x + min(row0 + lane / 2, nrows - 1) * stride_row + lane % 2 * (row_t::size - 16);
    if (!ahead && u_begin + group < u_end) { mmq_mid_prefetch(x_next + (u_begin + group) * row_t::size); }

    float acc[nt][4];
#pragma unroll
    for (int n = 0; n < nt; ++n) {
#pragma unroll
        for (int l = 0; l < 4; ++l) { acc[n][l] = 0.0f; }
    }

    const int  stage_bytes = ngroups * y_bytes;
    const auto load_stage  = [&](const int round) {
        const int          u      = u_begin + round * ngroups;
        const int          nbytes = min(ngroups, u_end - u) * y_bytes;
        const char *       src    = y + (int64_t) u * y_bytes;
        const unsigned int smem   = ggml_cuda_cvta_generic_to_shared(mmq_mid_smem + round % 2 * stage_bytes);
        for (int i = 16 * (32 * warp + lane); i < nbytes; i += 16 * 32 * blockDim.y) { cp_async_cg_16<0>(smem + i, src + i); }
    };

    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc();

    load_stage(0);

    for (int round = 0; round < nrounds; ++round) {
        cp_async_wait_all();
        __syncthreads();
        if (round + 1 < nrounds) { load_stage(round + 1); }

        const int u = u_begin + round * ngroups + group;
        if (u >= u_end) { continue; }

        row_t next[2];
        if constexpr (ahead) {
            if (u + ngroups < u_end) {
#pragma unroll
                for (int i = 0; i < 2; ++i) { next[i].load(x_row[i] + (u + ngroups) * row_t::size, t); }
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) { row[i].load(x_row[i] + u * row_t::size, t); }
            if (u + ngroups < u_end) { mmq_mid_prefetch(x_next + (u + ngroups) * row_t::size); }
        }

        const char *   ys = mmq_mid_smem + round % 2 * stage_bytes + group * y_bytes;
        const char *   yq = ys + lane % 8 * MMQ_MID_COL_BYTES + lane / 8 * 16; // of mmq_mid_load_b
        const float2 * yd = (const float2 *) (ys + ncols_padded * MMQ_MID_COL_BYTES) + 2 * t;

        if constexpr (row_t::has_min) {
            float d_super[2];
            float d_min[2];
            int   sc[2][2];
            int   mn[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float2 dm = __half22float2(*(const half2 *) &row[i].head.x);
                d_super[i]      = dm.x;
                d_min[i]        = dm.y;
                int mn8[2];
                mmq_thin_scales_k4(row[i].head, sc[i], mn8);
                mn[i] = mmq_mid_bytes_half((t < 2 ? mn8[0] : mn8[1]) >> (t % 2 * 16));
            }
#pragma unroll
            for (int n = 0; n < nt; ++n) {
                float c[4];
                mmq_mid_mma_f16(c, mn, *(const int *) (ys + (8 * n + g) * MMQ_MID_COL_BYTES + QK_K + 4 * t));
#pragma unroll
                for (int l = 0; l < 4; ++l) { acc[n][l] -= d_min[l / 2] * c[l]; }
            }
#pragma unroll
            for (int p = 0; p < 4; ++p) { // two sub-blocks
                int   a[2][4];
                float d[2][2];
#pragma unroll
                for (int s = 0; s < 2; ++s) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int2 q = row[i].get(2 * p + s);
                        a[s][0 + i]  = q.x;
                        a[s][2 + i]  = q.y;
                        // exact: 11 and 6 bits
                        d[s][i] = fmaf(d_super[i], mmq_mid_byte(sc[i][p / 2], p % 2 * 2 + s), -8388608.0f * d_super[i]);
                    }
                }
                // several tiles at once: loads and products of one wait for each other
                constexpr int nj = ahead ? 1 : 2;
#pragma unroll
                for (int n0 = 0; n0 < nt; n0 += nj) {
                    int    b[nj][4];
                    float4 y4[nj][2];
                    int    c[nj][2][4];
#pragma unroll
                    for (int j = 0; j < nj; ++j) { mmq_mid_load_b(b[j], yq + 8 * (n0 + j) * MMQ_MID_COL_BYTES + 64 * p); }
#pragma unroll
                    for (int j = 0; j < nj; ++j) {
#pragma unroll
                        for (int s = 0; s < 2; ++s) { y4[j][s] = *(const float4 *) (yd + (2 * p + s) * ncols_padded + 8 * (n0 + j)); }
                    }
#pragma unroll
                    for (int j = 0; j < nj; ++j) {
#pragma unroll
                        for (int s = 0; s < 2; ++s) { mmq_mid_mma_k32(c[j][s], a[s], b[j][2 * s + 0], b[j][2 * s + 1]); }
                    }
#pragma unroll
                    for (int j = 0; j < nj; ++j) {
#pragma unroll
                        for (int s = 0; s < 2; ++s) {
#pragma unroll
                            for (int i = 0; i < 2; ++i) {
                                acc[n0 + j][2 * i + 0] += d[s][i] * fmaf(__int_as_float(c[j][s][2 * i + 0]), y4[j][s].x, y4[j][s].y);
                                acc[n0 + j][2 * i + 1] += d[s][i] * fmaf(__int_as_float(c[j][s][2 * i + 1]), y4[j][s].z, y4[j][s].w);
                            }
                        }
                    }
                }
            }
        } else {
#pragma unroll
            for (int p = 0; p < 4; ++p) { // four sub-blocks of 16
                int   a[4][2];
                float d[4][2];
#pragma unroll
                for (int s = 0; s < 4; ++s) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        a[s][i] = row[i].get(4 * p + s);
                        d[s][i] = row[i].d * (mmq_mid_byte(row[i].sc[p] ^ 0x80808080, s) - 8388736.0f);
                    }
                }
#pragma unroll
                for (int n = 0; n < nt; ++n) {
                    int b[4];
                    mmq_mid_load_b(b, yq + 8 * n * MMQ_MID_COL_BYTES + 64 * p);
#pragma unroll
                    for (int s = 0; s < 4; ++s) {
                        const float4 y4 = *(const float4 *) (yd + (2 * p + s / 2) * ncols_padded + 8 * n);
                        int          c[4];
                        mmq_mid_mma_k16(c, a[s], b[s]);
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            acc[n][2 * i + 0] += d[s][i] * fmaf(__int_as_float(c[2 * i + 0]), y4.x, y4.y);
                            acc[n][2 * i + 1] += d[s][i] * fmaf(__int_as_float(c[2 * i + 1]), y4.z, y4.w);
                        }
                    }
                }
            }
        }

        if constexpr (ahead) {
#pragma unroll
            for (int i = 0; i < 2; ++i) { row[i] = next[i]; }
        }
    }

    // Sum over groups, the sums of a warp are written as they are.
    float4 * sums = (float4 *) mmq_mid_smem;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < nt; ++n) { sums[(warp * nt + n) * 32 + lane] = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]); }
    __syncthreads();

    const int  ntiles = nwarps_row * nt; // of 16 rows and 8 columns
    const auto write  = [&](const int tile, const float4 sum) {
        const int row  = (blockIdx.x * nwarps_row + tile / nt) * 16 + g;
        const int col  = tile % nt * 8 + 2 * t;
        float *   dst0 = dst + col * stride_dst + row;
        if (row < nrows) {
            if (col + 0 < ncols) { dst0[0] = sum.x; }
            if (col + 1 < ncols) { dst0[stride_dst] = sum.y; }
        }
        if (row + 8 < nrows) {
            if (col + 0 < ncols) { dst0[8] = sum.z; }
            if (col + 1 < ncols) { dst0[stride_dst + 8] = sum.w; }
        }
    };
    const auto add = [](float4 & sum, const float4 v) {
        sum.x += v.x;
        sum.y += v.y;
        sum.z += v.z;
        sum.w += v.w;
    };
    float4 * partial_block = partial + (int64_t) blockIdx.x * nsplits * ntiles * 32;
    for (int tile = warp; tile < ntiles; tile += blockDim.y) {
        float4 sum = sums[tile * 32 + lane];
        for (int k = 1; k < ngroups; ++k) { add(sum, sums[(k * ntiles + tile) * 32 + lane]); }
        if (nsplits == 1) {
            write(tile, sum);
        } else {
            partial_block[(blockIdx.y * ntiles + tile) * 32 + lane] = sum;
        }
    }
    if (nsplits == 1) { return; }

    // The last block adds up the sums of all of them, in order whichever it is.
    __shared__ int is_last;
    __threadfence();
    __syncthreads();
    if (warp == 0 && lane == 0) { is_last = atomicAdd(counters + blockIdx.x, 1) == nsplits - 1; }
    __syncthreads();
    if (!is_last) { return; }
    __threadfence();
    for (int tile = warp; tile < ntiles; tile += blockDim.y) {
        float4 sum = __ldcg(partial_block + tile * 32 + lane);
#pragma unroll 4
        for (int k = 1; k < nsplits; ++k) { add(sum, __ldcg(partial_block + (k * ntiles + tile) * 32 + lane)); }
        write(tile, sum);
    }
    if (warp == 0 && lane == 0) { counters[blockIdx.x] = 0; }
#else
    GGML_UNUSED_VARS(x, y, dst, partial, counters, nrows, nsuper, stride_row, ncols, stride_dst, nwarps_row, ngroups);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

struct mmq_mid_shape {
    int nwarps_row; // warps of a block with different rows
    int ngroups;    // groups of these that share the super-blocks
    int nsplits;    // blocks that share the super-blocks of the same rows
};

// The shape with the least cycles by a model of the busiest multiprocessor: instructions of its warps, bytes of its columns.
static mmq_mid_shape mmq_mid_choose_shape(const int64_t nrows, const int nsuper, const int nt, const int nsm, const size_t smem_max) {
    static const char * shape_env = getenv("GGML_CUDA_MMQ_MID_SHAPE");
    mmq_mid_shape       shape_set;
    if (shape_env && sscanf(shape_env, "%d,%d,%d", &shape_set.nwarps_row, &shape_set.ngroups, &shape_set.nsplits) == 3) { return shape_set; }
    const int     cycles_unit  = 60 + 100 * nt; // a warp's super-block
    const int     bytes_cycle  = 24;            // from the L2 cache to a multiprocessor
    const int     cycles_block = 1500;          // until the first super-block is there, and for the sum
    const int     y_bytes      = mmq_mid_y_bytes(8 * nt);
    const int64_t ntiles       = (nrows + 15) / 16;

    mmq_mid_shape best        = { 1, 1, 1 };
    int64_t       best_cycles = INT64_MAX;
    for (int nsplits = 1; nsplits <= std::min(nsuper, 8); ++nsplits) {
        for (int nwarps_row = 1; nwarps_row <= MMQ_MID_MAX_WARPS; ++nwarps_row) {
            for (int ngroups = 1; ngroups * nwarps_row <= MMQ_MID_MAX_WARPS; ++ngroups) {
                const int    nwarps = nwarps_row * ngroups;
                const size_t smem   = std::max<size_t>(2 * ngroups * y_bytes, nwarps * nt * 4 * 32 * sizeof(float));
                if (smem > smem_max) { break; }
                const int64_t nblocks_x = (ntiles + nwarps_row - 1) / nwarps_row;
                if (nsplits > 1 && nblocks_x > MMQ_MID_MAX_COUNTERS) { continue; }
                const int64_t nblocks_sm = (nblocks_x * nsplits + nsm - 1) / nsm;
                const int64_t resident =
                        std::min<int64_t>(nblocks_sm, std::max<int64_t>(1, std::min<int64_t>(MMQ_MID_MAX_WARPS / nwarps, smem_max / smem)));
                const int64_t nrounds = ((nsuper + nsplits - 1) / nsplits + ngroups - 1) / ngroups;
                const int64_t cycles_round =
                        std::max<int64_t>({ (resident * nwarps + 3) / 4 * cycles_unit, 2 * cycles_unit, resident * ngroups * y_bytes / bytes_cycle });
                int64_t cycles = (nblocks_sm + resident - 1) / resident * (nrounds * cycles_round + cycles_block);
                if (nsplits > 1) { cycles += cycles_block + 2 * nblocks_sm * nwarps_row * nt * 4 * 32 * (int64_t) sizeof(float) / bytes_cycle; }
                if (cycles < best_cycles) {
                    best_cycles = cycles;
                    best        = { nwarps_row, ngroups, nsplits };
                }
            }
        }
    }
    return best;
}

template <ggml_type type, int nt>
static void launch_mul_mat_q_mid(ggml_backend_cuda_context & ctx, const void * x, const char * y, float * dst, const int64_t nrows,
        const int64_t nsuper, const int64_t stride_row, const int64_t ncols, const int64_t stride_dst) {
    const int    device   = ggml_cuda_get_device();
    const int    nsm      = ggml_cuda_info().devices[device].nsm;
    const size_t smem_max = ggml_cuda_info().devices[device].smpbo - 1024;

    const mmq_mid_shape shape = mmq_mid_choose_shape(nrows, nsuper, nt, nsm, smem_max);

    const int     nwarps  = shape.nwarps_row * shape.ngroups;
    const int64_t nblocks = ((nrows + 15) / 16 + shape.nwarps_row - 1) / shape.nwarps_row;
    const size_t  smem    = std::max<size_t>(2 * shape.ngroups * mmq_mid_y_bytes(8 * nt), nwarps * nt * 4 * 32 * sizeof(float));

    ggml_cuda_pool_alloc<float4> partial(ctx.pool());
    cudaStream_t                 stream     = ctx.stream();
    int *                        counters_d = nullptr;
    if (shape.nsplits > 1) {
        partial.alloc(nblocks * shape.nsplits * shape.nwarps_row * nt * 32);
        if (ctx.mmq_mid_counters == nullptr) {
            CUDA_CHECK(cudaMalloc((void **) &ctx.mmq_mid_counters, MMQ_MID_MAX_COUNTERS * sizeof(int)));
            CUDA_CHECK(cudaMemsetAsync(ctx.mmq_mid_counters, 0, MMQ_MID_MAX_COUNTERS * sizeof(int), stream));
        }
        counters_d = ctx.mmq_mid_counters;
    }

    CUDA_SET_SHARED_MEMORY_LIMIT((mul_mat_q_mid<type, nt>), smem_max);
    const ggml_cuda_kernel_launch_params launch_params =
            ggml_cuda_kernel_launch_params(dim3(nblocks, shape.nsplits, 1), dim3(32, nwarps, 1), smem, stream);
    ggml_cuda_kernel_launch(mul_mat_q_mid<type, nt>, launch_params, (const uint8_t *) x, y, dst, partial.get(), counters_d, (int) nrows, (int) nsuper,
            stride_row, (int) ncols, stride_dst, shape.nwarps_row, shape.ngroups);
    CUDA_CHECK(cudaGetLastError());
}

template <ggml_type type>
static void mul_mat_q_mid_switch_ncols(ggml_backend_cuda_context & ctx, const void * x, const char * y, float * dst, const int64_t nrows,
        const int64_t nsuper, const int64_t stride_row, const int64_t ncols, const int nt, const int64_t stride_dst) {
    switch (nt) {
        case 4:
            launch_mul_mat_q_mid<type, 4>(ctx, x, y, dst, nrows, nsuper, stride_row, ncols, stride_dst);
            break;
        case 6:
            launch_mul_mat_q_mid<type, 6>(ctx, x, y, dst, nrows, nsuper, stride_row, ncols, stride_dst);
            break;
        case 8:
            launch_mul_mat_q_mid<type, 8>(ctx, x, y, dst, nrows, nsuper, stride_row, ncols, stride_dst);
            break;
        default:
            GGML_ABORT("fatal error");
    }
}

void ggml_cuda_mul_mat_q_mid(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, ggml_tensor * dst) {
    const int64_t nsuper   = src0->ne[0] / QK_K;
    const int64_t nrows    = src0->ne[1];
    const int64_t ncols    = src1->ne[1];
    const int     nt       = std::max<int>(4, (ncols + 15) / 16 * 2); // 4, 6, 8
    const bool    permuted = src0->type != GGML_TYPE_Q6_K;

    cudaStream_t stream = ctx.stream();

    const size_t               nbytes = nsuper * mmq_mid_y_bytes(8 * nt);
    ggml_cuda_pool_alloc<char> src1_pool(ctx.pool());
    bool                       found;
    char * y = (char *) ggml_cuda_quantized_columns(ctx, src1, permuted ? GGML_CUDA_QUANTIZED_MID_PERMUTED : GGML_CUDA_QUANTIZED_MID, nbytes, found);
    if (y == nullptr) { y = src1_pool.alloc(nbytes); }
    if (!found) {
        const ggml_cuda_kernel_launch_params launch_params = ggml_cuda_kernel_launch_params(dim3(nsuper, 2 * nt, 1), dim3(QK_K / 4, 4, 1), 0, stream);
        ggml_cuda_kernel_launch(permuted ? quantize_mmq_mid<true> : quantize_mmq_mid<false>, launch_params, (const float *) src1->data, y,
                (int64_t) (src1->nb[1] / sizeof(float)), (int) ncols, 8 * nt);
        CUDA_CHECK(cudaGetLastError());
    }

    const int64_t stride_dst = dst->nb[1] / sizeof(float);
    float *       dst_d      = (float *) dst->data;
    switch (src0->type) {
        case GGML_TYPE_Q4_K:
            mul_mat_q_mid_switch_ncols<GGML_TYPE_Q4_K>(ctx, src0->data, y, dst_d, nrows, nsuper, src0->nb[1], ncols, nt, stride_dst);
            break;
        case GGML_TYPE_Q5_K:
            mul_mat_q_mid_switch_ncols<GGML_TYPE_Q5_K>(ctx, src0->data, y, dst_d, nrows, nsuper, src0->nb[1], ncols, nt, stride_dst);
            break;
        case GGML_TYPE_Q6_K:
            mul_mat_q_mid_switch_ncols<GGML_TYPE_Q6_K>(ctx, src0->data, y, dst_d, nrows, nsuper, src0->nb[1], ncols, nt, stride_dst);
            break;
        default:
            GGML_ABORT("fatal error");
    }
}

bool ggml_cuda_should_use_mmq_mid(const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * dst, const int cc) {
    if (!ampere_mma_available(cc) || (src0->type != GGML_TYPE_Q4_K && src0->type != GGML_TYPE_Q5_K && src0->type != GGML_TYPE_Q6_K)) { return false; }

    // Tuned on H200 with Q4_K and Q6_K. Matrices with few rows are always faster, mmq-thin.cu has the other small ones. Of large
    //     ones those are faster that have rows for all multiprocessors or many columns.
    static const char * min_c     = getenv("GGML_CUDA_MMQ_MID_MIN");
    static const char * max_c     = getenv("GGML_CUDA_MMQ_MID_MAX");
    const bool          is_large  = src0->ne[0] * src0->ne[1] > 4096 * 2560;
    const bool          is_fast   = src0->ne[1] <= 1024 || (is_large && (src1->ne[1] > 48 || (src0->type != GGML_TYPE_Q6_K && src0->ne[1] >= 8192)));
    const int64_t       ncols_min = min_c ? atoi(min_c) : is_fast ? 17 : INT_MAX;
    const int64_t       ncols_max = max_c ? atoi(max_c) : MMQ_MID_MAX_BATCH_SIZE;
    if (src1->ne[1] < ncols_min || src1->ne[1] > std::min<int64_t>(ncols_max, MMQ_MID_MAX_BATCH_SIZE)) { return false; }

    // loads of 16 bytes
    return src0->ne[0] % QK_K == 0 && src0->ne[2] * src0->ne[3] == 1 && src1->ne[2] * src1->ne[3] == 1 && src0->nb[0] == ggml_type_size(src0->type) &&
           src1->nb[0] == sizeof(float) && dst->nb[0] == sizeof(float) && src1->nb[1] % 16 == 0 && (uintptr_t) src1->data % 16 == 0 &&
           (src0->type == GGML_TYPE_Q6_K || (src0->nb[1] % 16 == 0 && (uintptr_t) src0->data % 16 == 0));
}
