#include "mmq-thin.cuh"
#include "mmq-thin-rows.cuh"
#include "quantize.cuh"

// Products of a quantized matrix with few columns (up to 64), limited by the memory that the matrix is read from.
//
// A block has 16 or 32 rows of the matrix, its warps share the super-blocks of those rows. Each warp loads quants straight
// into the registers where mma.sync wants them, so there is no shared memory to fill and no barrier before the sum over
// warps at the end. The order of values inside a sub-block is free as long as both operands have the same: a thread takes
// 8 consecutive bytes. Like for MMQ the columns are quantized to q8_1, there is one scale for each product of sub-blocks.
//
// Which warp has which super-block depends on the length of the rows only and each column is by itself:
//     a column's result does not depend on the other columns or on how many there are.

#define MMQ_THIN_Y_INTS 36 // size of block_q8_1_mmq: 4 scales (and sums) for 32 values each, 128 values

// nt: tiles of 8 columns, rt: tiles of 16 rows
template <ggml_type type, int nt, int rt>
static __global__ void __launch_bounds__(256, (rt > 1 ? 1 : 2)) mul_mat_q_thin(const uint8_t * x, const int * y, float * dst, const int nrows,
        const int nsuper, const int64_t stride_row, const int ncols, const int64_t stride_dst, const bool early) {
    ggml_cuda_pdl_lc();
    const int lane   = threadIdx.x;
    const int warp   = threadIdx.y;
    const int nwarps = blockDim.y;
    const int g      = lane / 4;
    const int t      = lane % 4;
    const int row0   = blockIdx.x * (16 * rt);

    using row_t = mmq_thin_row<type>;

    float acc[rt][nt][4];
#pragma unroll
    for (int r = 0; r < rt; ++r) {
#pragma unroll
        for (int n = 0; n < nt; ++n) {
#pragma unroll
            for (int l = 0; l < 4; ++l) { acc[r][n][l] = 0.0f; }
        }
    }

    // Rows and columns that are not there are those at the end again, nothing is written for them.
    const uint8_t * x_row[rt][2];
#pragma unroll
    for (int r = 0; r < rt; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i) { x_row[r][i] = x + min(row0 + 16 * r + 8 * i + g, nrows - 1) * stride_row; }
    }

    row_t      row[rt][2];
    const auto load = [&](const int u) {
#pragma unroll
        for (int r = 0; r < rt; ++r) {
#pragma unroll
            for (int i = 0; i < 2; ++i) { row[r][i].load(x_row[r][i] + u * row_t::size, t); }
        }
    };

    // Rows are requested before the kernel in front of this one has written the columns, if it does not write them: the first super-blocks
    //     into registers, all into the L2 cache.
    if (!early) { ggml_cuda_pdl_sync(); }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
    const int64_t nbytes = min(16 * rt, nrows - row0) * stride_row;
    for (int64_t i = 128 * (warp * 32 + lane); i < nbytes; i += 128 * 32 * nwarps) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(x + row0 * stride_row + i));
    }
#endif // defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
    load(warp);
    if (early) { ggml_cuda_pdl_sync(); }

    for (int u = warp; u < nsuper; u += nwarps) {
        if (u != warp) { load(u); }

        if constexpr (row_t::has_min) {
            float2 dm[rt][2];
            int    sc[rt][2][2];
            int    mn[rt][2][2];
#pragma unroll
            for (int r = 0; r < rt; ++r) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    dm[r][i] = __half22float2(*(const half2 *) &row[r][i].head.x);
                    mmq_thin_scales_k4(row[r][i].head, sc[r][i], mn[r][i]);
                }
            }
#pragma unroll
            for (int k = 0; k < 2; ++k) { // 128 values
                const int * yk = y + (int64_t) (2 * u + k) * ncols * MMQ_THIN_Y_INTS;
                int         a[4][rt][4];
                float       d[4][rt][2];
                float       m[4][rt][2];
#pragma unroll
                for (int s = 0; s < 4; ++s) {
#pragma unroll
                    for (int r = 0; r < rt; ++r) {
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const int2 q   = row[r][i].get(4 * k + s);
                            a[s][r][0 + i] = q.x;
                            a[s][r][2 + i] = q.y;
                            d[s][r][i]     = dm[r][i].x * ((sc[r][i][k] >> (8 * s)) & 0xFF);
                            m[s][r][i]     = dm[r][i].y * ((mn[r][i][k] >> (8 * s)) & 0xFF);
                        }
                    }
                }
#pragma unroll
                for (int n = 0; n < nt; ++n) {
                    const int * yb  = yk + min(8 * n + g, ncols - 1) * MMQ_THIN_Y_INTS + 4 + 2 * t;
                    const int4  ds0 = *(const int4 *) (yk + min(8 * n + 2 * t + 0, ncols - 1) * MMQ_THIN_Y_INTS);
                    const int4  ds1 = *(const int4 *) (yk + min(8 * n + 2 * t + 1, ncols - 1) * MMQ_THIN_Y_INTS);
#pragma unroll
                    for (int s = 0; s < 4; ++s) {
                        const int2   b2   = *(const int2 *) (yb + 8 * s);
                        const int    b[2] = { b2.x, b2.y };
                        const int    i0   = s == 0 ? ds0.x : s == 1 ? ds0.y : s == 2 ? ds0.z : ds0.w;
                        const int    i1   = s == 0 ? ds1.x : s == 1 ? ds1.y : s == 2 ? ds1.z : ds1.w;
                        const float2 y0   = __half22float2(*(const half2 *) &i0);
                        const float2 y1   = __half22float2(*(const half2 *) &i1);
#pragma unroll
                        for (int r = 0; r < rt; ++r) {
                            int c[4] = { 0, 0, 0, 0 };
                            mmq_thin_mma_k32(c, a[s][r], b);
#pragma unroll
                            for (int i = 0; i < 2; ++i) {
                                acc[r][n][2 * i + 0] += d[s][r][i] * (y0.x * c[2 * i + 0]) - m[s][r][i] * y0.y;
                                acc[r][n][2 * i + 1] += d[s][r][i] * (y1.x * c[2 * i + 1]) - m[s][r][i] * y1.y;
                            }
                        }
                    }
                }
            }
        } else {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const int * yk = y + (int64_t) (2 * u + k) * ncols * MMQ_THIN_Y_INTS;
#pragma unroll
                for (int s = 0; s < 4; ++s) { // 32 values, two sub-blocks with a common scale of y
                    int   a[2][rt][2];
                    float d[2][rt][2];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
#pragma unroll
                        for (int r = 0; r < rt; ++r) {
#pragma unroll
                            for (int i = 0; i < 2; ++i) {
                                a[h][r][i] = row[r][i].get(8 * k + 2 * s + h);
                                d[h][r][i] = row[r][i].scale(8 * k + 2 * s + h);
                            }
                        }
                    }
#pragma unroll
                    for (int n = 0; n < nt; ++n) {
                        const int * yb   = yk + min(8 * n + g, ncols - 1) * MMQ_THIN_Y_INTS + 4 + 8 * s + t;
                        const float y0   = __int_as_float(yk[min(8 * n + 2 * t + 0, ncols - 1) * MMQ_THIN_Y_INTS + s]);
                        const float y1   = __int_as_float(yk[min(8 * n + 2 * t + 1, ncols - 1) * MMQ_THIN_Y_INTS + s]);
                        const int   b[2] = { yb[0], yb[4] };
#pragma unroll
                        for (int r = 0; r < rt; ++r) {
                            int c[2][4] = {
                                { 0, 0, 0, 0 },
                                { 0, 0, 0, 0 }
                            };
#pragma unroll
                            for (int h = 0; h < 2; ++h) { mmq_thin_mma_k16(c[h], a[h][r], b[h]); }
#pragma unroll
                            for (int i = 0; i < 2; ++i) {
                                acc[r][n][2 * i + 0] += y0 * (d[0][r][i] * c[0][2 * i + 0] + d[1][r][i] * c[1][2 * i + 0]);
                                acc[r][n][2 * i + 1] += y1 * (d[0][r][i] * c[0][2 * i + 1] + d[1][r][i] * c[1][2 * i + 1]);
                            }
                        }
                    }
                }
            }
        }
    }

    // Sum over warps, the partial sums of a warp are written as they are.
    extern __shared__ float mmq_thin_smem[];
    constexpr int           nvals = rt * nt * 4;
#pragma unroll
    for (int r = 0; r < rt; ++r) {
#pragma unroll
        for (int n = 0; n < nt; ++n) {
#pragma unroll
            for (int l = 0; l < 4; ++l) { mmq_thin_smem[(warp * nvals + (r * nt + n) * 4 + l) * 32 + lane] = acc[r][n][l]; }
        }
    }
    __syncthreads();
    for (int v = warp; v < nvals; v += nwarps) {
        float sum = 0.0f;
        for (int w = 0; w < nwarps; ++w) { sum += mmq_thin_smem[(w * nvals + v) * 32 + lane]; }
        const int row = row0 + v / (4 * nt) * 16 + v % 4 / 2 * 8 + g;
        const int col = v / 4 % nt * 8 + 2 * t + v % 2;
        if (row < nrows && col < ncols) { dst[col * stride_dst + row] = sum; }
    }
}

template <ggml_type type, int nt, int rt>
static void launch_mul_mat_q_thin(const void * x, const void * y, float * dst, const int64_t nrows, const int64_t nsuper, const int64_t stride_row,
        const int64_t ncols, const int64_t stride_dst, const bool early, cudaStream_t stream) {
    // Up to 8 warps, as many as share the super-blocks evenly.
    int nwarps = 1;
    for (int n = 2; n <= 8; ++n) {
        if ((nsuper + n - 1) / n * n - nsuper <= (nsuper + nwarps - 1) / nwarps * nwarps - nsuper) { nwarps = n; }
    }
    const dim3   block_dims(32, nwarps, 1);
    const dim3   block_nums((nrows + 16 * rt - 1) / (16 * rt), 1, 1);
    const size_t nbytes_shared = nwarps * rt * nt * 4 * 32 * sizeof(float);
    CUDA_SET_SHARED_MEMORY_LIMIT((mul_mat_q_thin<type, nt, rt>), 8 * rt * nt * 4 * 32 * sizeof(float));
    const ggml_cuda_kernel_launch_params launch_params = ggml_cuda_kernel_launch_params(block_nums, block_dims, nbytes_shared, stream);
    ggml_cuda_kernel_launch(mul_mat_q_thin<type, nt, rt>, launch_params, (const uint8_t *) x, (const int *) y, dst, (int) nrows, (int) nsuper,
            stride_row, (int) ncols, stride_dst, early);
    CUDA_CHECK(cudaGetLastError());
}

template <ggml_type type>
static void mul_mat_q_thin_switch_ncols(const void * x, const void * y, float * dst, const int64_t nrows, const int64_t nsuper,
        const int64_t stride_row, const int64_t ncols, const int64_t stride_dst, const bool early, cudaStream_t stream) {
    switch ((ncols + 7) / 8) {
        case 1:
            launch_mul_mat_q_thin<type, 1, 1>(x, y, dst, nrows, nsuper, stride_row, ncols, stride_dst, early, stream);
            break;
        case 2:
            launch_mul_mat_q_thin<type, 2, 1>(x, y, dst, nrows, nsuper, stride_row, ncols, stride_dst, early, stream);
            break;
        case 3:
        case 4:
            launch_mul_mat_q_thin<type, 4, 2>(x, y, dst, nrows, nsuper, stride_row, ncols, stride_dst, early, stream);
            break;
        case 5:
        case 6:
            launch_mul_mat_q_thin<type, 6, 2>(x, y, dst, nrows, nsuper, stride_row, ncols, stride_dst, early, stream);
            break;
        case 7:
        case 8:
            launch_mul_mat_q_thin<type, 8, 2>(x, y, dst, nrows, nsuper, stride_row, ncols, stride_dst, early, stream);
            break;
        default:
            GGML_ABORT("fatal error");
    }
}

void ggml_cuda_mul_mat_q_thin(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, ggml_tensor * dst) {
    const int64_t ne00        = src0->ne[0];
    const int64_t nrows       = src0->ne[1];
    const int64_t ncols       = src1->ne[1];
    const int64_t ne10_padded = GGML_PAD(ne00, MATRIX_ROW_PADDING);

    cudaStream_t stream = ctx.stream();

    const size_t               nbytes_q8_1 = ncols * ne10_padded / 128 * MMQ_THIN_Y_INTS * sizeof(int);
    ggml_cuda_pool_alloc<char> src1_pool(ctx.pool());
    bool                       found;
    char *                     src1_q8_1 = (char *) ggml_cuda_quantized_columns(
            ctx, src1, src0->type == GGML_TYPE_Q6_K ? GGML_CUDA_QUANTIZED_MMQ_D4 : GGML_CUDA_QUANTIZED_MMQ_DS4, nbytes_q8_1, found);
    if (src1_q8_1 == nullptr) { src1_q8_1 = src1_pool.alloc(nbytes_q8_1); }
    if (!found) {
        quantize_mmq_q8_1_cuda((const float *) src1->data, nullptr, src1_q8_1, src0->type, ne00, src1->nb[1] / sizeof(float),
                src1->nb[2] / sizeof(float), src1->nb[3] / sizeof(float), ne10_padded, ncols, 1, 1, stream);
        CUDA_CHECK(cudaGetLastError());
    }

    const int64_t nsuper     = ne00 / QK_K;
    const int64_t stride_dst = dst->nb[1] / sizeof(float);
    const bool    early      = ggml_backend_buffer_get_usage(src0->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    float *       dst_d      = (float *) dst->data;
    switch (src0->type) {
        case GGML_TYPE_Q4_K:
            mul_mat_q_thin_switch_ncols<GGML_TYPE_Q4_K>(src0->data, src1_q8_1, dst_d, nrows, nsuper, src0->nb[1], ncols, stride_dst, early, stream);
            break;
        case GGML_TYPE_Q5_K:
            mul_mat_q_thin_switch_ncols<GGML_TYPE_Q5_K>(src0->data, src1_q8_1, dst_d, nrows, nsuper, src0->nb[1], ncols, stride_dst, early, stream);
            break;
        case GGML_TYPE_Q6_K:
            mul_mat_q_thin_switch_ncols<GGML_TYPE_Q6_K>(src0->data, src1_q8_1, dst_d, nrows, nsuper, src0->nb[1], ncols, stride_dst, early, stream);
            break;
        default:
            GGML_ABORT("fatal error");
    }
}

bool ggml_cuda_should_use_mmq_thin(const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * dst, const int cc) {
    if (!ampere_mma_available(cc) || (src0->type != GGML_TYPE_Q4_K && src0->type != GGML_TYPE_Q5_K && src0->type != GGML_TYPE_Q6_K)) { return false; }

    // Tuned on H200: MMVQ is faster for fewer columns, MMQ for more, unless the matrix is too small for its tiles to fill the GPU.
    static const char * min_c     = getenv("GGML_CUDA_MMQ_THIN_MIN");
    static const char * max_c     = getenv("GGML_CUDA_MMQ_THIN_MAX");
    const int64_t       ncols_min = min_c ? atoi(min_c) : src0->type == GGML_TYPE_Q6_K ? 4 : 3;
    const int64_t       ncols_max = max_c ? atoi(max_c) : src0->ne[0] * src0->ne[1] <= 4096 * 2560 ? MMQ_THIN_MAX_BATCH_SIZE : 16;
    if (src1->ne[1] < ncols_min || src1->ne[1] > std::min<int64_t>(ncols_max, MMQ_THIN_MAX_BATCH_SIZE)) { return false; }

    // 16 byte loads for Q4_K and Q5_K
    return src0->ne[0] % QK_K == 0 && src0->ne[1] >= 16 && src0->ne[2] * src0->ne[3] == 1 && src1->ne[2] * src1->ne[3] == 1 &&
           src0->nb[0] == ggml_type_size(src0->type) && src1->nb[0] == sizeof(float) && dst->nb[0] == sizeof(float) &&
           (src0->type == GGML_TYPE_Q6_K || (src0->nb[1] % 16 == 0 && (uintptr_t) src0->data % 16 == 0));
}
