#include "mmf-grouped.cuh"
#include "cp-async.cuh"

#include <type_traits>

#define GROUPED_FEW_MAX_TOKENS 2
#define GROUPED_FEW_MAX_PAIRS  256

template <typename T>
static __device__ __forceinline__ void grouped_mma(
        float (&c)[4], const uint32_t a0, const uint32_t a1, const uint32_t a2, const uint32_t a3, const uint32_t b0, const uint32_t b1) {
#ifdef AMPERE_MMA_AVAILABLE
    if constexpr (std::is_same_v<T, half>) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
#else
    GGML_UNUSED_VARS(c, a0, a1, a2, a3, b0, b1);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

static __device__ __forceinline__ void grouped_copy(uint4 * dst, const void * src) {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" : : "r"(ggml_cuda_cvta_generic_to_shared(dst)), "l"(src) : "memory");
#else
    GGML_UNUSED_VARS(dst, src);
    NO_DEVICE_CODE;
#endif // CP_ASYNC_AVAILABLE
}

static __device__ __forceinline__ void grouped_commit() {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif // CP_ASYNC_AVAILABLE
}

template <int n>
static __device__ __forceinline__ void grouped_wait() {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.wait_group %0;" : : "n"(n) : "memory");
#endif // CP_ASYNC_AVAILABLE
}

// Lanes of a warp hold 8 values of a row in 16 bytes. The order of K in the product is 0, 1, 8, 9, ..., 25, 2, 3, 10, ... in all
//     kernels of this file, so that each lane can use what it has loaded and all have the same sums.
template <typename T>
static __device__ __forceinline__ uint4 grouped_convert(const float * src) {
    const float4 a = ((const float4 *) src)[0];
    const float4 b = ((const float4 *) src)[1];
    uint4        r;
    if constexpr (std::is_same_v<T, half>) {
        half2 * h = (half2 *) &r;
        h[0]      = __floats2half2_rn(a.x, a.y);
        h[1]      = __floats2half2_rn(a.z, a.w);
        h[2]      = __floats2half2_rn(b.x, b.y);
        h[3]      = __floats2half2_rn(b.z, b.w);
    } else {
        nv_bfloat162 * h = (nv_bfloat162 *) &r;
        h[0]             = __floats2bfloat162_rn(a.x, a.y);
        h[1]             = __floats2bfloat162_rn(a.z, a.w);
        h[2]             = __floats2bfloat162_rn(b.x, b.y);
        h[3]             = __floats2bfloat162_rn(b.z, b.w);
    }
    return r;
}

static __device__ __forceinline__ float grouped_glu(const float gate, const float up) { return gate / (1.0f + expf(-gate)) * up; }

// Few tokens: a warp has 16 rows of an expert, streams them through shared memory that is its own, and needs no sorted rows. The
//     block of the first pair of a token and an expert has all pairs of that expert. With glu half of the warps have gate.
template <typename T, bool glu, int nwarps, int depth, int ntiles>
__launch_bounds__(32 * nwarps) static __global__ void mul_mat_f_few(const grouped_args p, const bool by_pair) {
    constexpr int           rows = (glu ? nwarps / 2 : nwarps) * 16;
    extern __shared__ uint4 smem_grouped[];
    __shared__ int          n, first, pairs[GROUPED_FEW_MAX_PAIRS];

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    uint4 *   ring = smem_grouped + warp * depth * 128 + lane;
    uint4 *   ys   = smem_grouped + nwarps * depth * 128;

    const int  n_pairs = p.n_tokens * p.n_used;
    const auto id      = [&](const int i) { return p.ids[(i / p.n_used) * p.si_token + i % p.n_used]; };
    const int  expert  = by_pair ? id(blockIdx.y) : blockIdx.y;
    if (expert < 0 || expert >= p.n_experts) { return; }
    // with glu the first half of the warps has gate
    const int row0 = blockIdx.x * rows + warp * 16 % rows;
    const T * w[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        w[i] = (const T *) (glu && warp < nwarps / 2 ? p.w_gate : p.w) + expert * p.sw_expert + min(row0 + i * 8 + g, p.rows - 1) * p.sw_row + t * 8;
    }
    const int  chunks = p.k / 64;
    const auto fetch  = [&](const int c) {
        if (c < chunks) {
#pragma unroll
            for (int i = 0; i < 4; ++i) { grouped_copy(ring + ((c % depth) * 4 + i) * 32, w[i % 2] + c * 64 + i / 2 * 32); }
        }
        grouped_commit();
    };
    const auto begin = [&]() {
#pragma unroll
        for (int c = 0; c < depth - 1; ++c) { fetch(c); }
    };
    if (by_pair) { begin(); }
    if (threadIdx.x == 0) {
        n     = 0;
        first = n_pairs;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_pairs; i += 32 * nwarps) {
        if (id(i) == expert) {
            pairs[atomicAdd(&n, 1)] = i;
            atomicMin(&first, i);
        }
    }
    __syncthreads();
    if (n == 0 || (by_pair && first < blockIdx.y)) {
        grouped_wait<0>();
        return;
    }
    if (!by_pair) { begin(); }
    const int units = p.k / 8;
    for (int j0 = 0; j0 < n; j0 += 8 * ntiles) {
        if (j0 > 0) {
            __syncthreads();
            begin();
        }
        const int cols = min(8 * ntiles, n - j0);
        for (int i = threadIdx.x; i < cols * units; i += 32 * nwarps) {
            const int col = i / units, u = i % units, pair = pairs[j0 + col];
            ys[(u / 4 * ntiles + col / 8) * 32 + col % 8 * 4 + u % 4] =
                    grouped_convert<T>(p.y + pair / p.n_used * p.sy_token + pair % p.n_used % p.n_channels * p.sy_channel + u * 8);
        }
        __syncthreads();

        float      acc[ntiles][4] = {};
        uint4      a[4], b[2][ntiles], a1[4], b1[2][ntiles];
        const auto load = [&](const int c) {
            grouped_wait<depth - 2>();
#pragma unroll
            for (int i = 0; i < 4; ++i) { a1[i] = ring[((c % depth) * 4 + i) * 32]; }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 0; j < ntiles; ++j) { b1[i][j] = ys[((2 * c + i) * ntiles + j) * 32 + lane]; }
            }
        };
        load(0);
#pragma unroll 2
        for (int c = 0; c < chunks; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) { a[i] = a1[i]; }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 0; j < ntiles; ++j) { b[i][j] = b1[i][j]; }
            }
            fetch(c + depth - 1);
            if (c + 1 < chunks) { load(c + 1); }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 0; j < ntiles; ++j) {
                    grouped_mma<T>(acc[j], a[2 * i].x, a[2 * i + 1].x, a[2 * i].y, a[2 * i + 1].y, b[i][j].x, b[i][j].y);
                    grouped_mma<T>(acc[j], a[2 * i].z, a[2 * i + 1].z, a[2 * i].w, a[2 * i + 1].w, b[i][j].z, b[i][j].w);
                }
            }
        }
        float * gate = (float *) smem_grouped + (warp % (nwarps / 2)) * ntiles * 128 + lane; // the rings are read
        if (glu) {
            grouped_wait<0>();
            __syncthreads();
            if (warp < nwarps / 2) {
#pragma unroll
                for (int j = 0; j < 4 * ntiles; ++j) { gate[j * 32] = acc[j / 4][j % 4]; }
            }
            __syncthreads();
        }
#pragma unroll
        for (int j = 0; j < 4 * ntiles; ++j) {
            const int col = j / 4 * 8 + 2 * t + j % 2, row = row0 + g + j / 2 % 2 * 8;
            if (col < cols && row < p.rows && (!glu || warp >= nwarps / 2)) {
                const int pair = pairs[j0 + col];
                p.dst[pair / p.n_used * p.sd_token + pair % p.n_used * p.sd_channel + row] =
                        glu ? grouped_glu(gate[j * 32], acc[j / 4][j % 4]) : acc[j / 4][j % 4];
            }
        }
    }
}

// The first block sorts pairs by expert, in no fixed order for each, and makes tiles of them. The others convert src1.
template <typename T>
__launch_bounds__(1024) static __global__ void grouped_sort(const grouped_args p, const grouped_plan plan, const int tile_cols) {
    if (blockIdx.x > 0) {
        const int     units = p.k / 8;
        const int64_t all   = (int64_t) p.n_tokens * p.n_channels * units;
        for (int64_t i = (int64_t) (blockIdx.x - 1) * 1024 + threadIdx.x; i < all; i += (int64_t) (gridDim.x - 1) * 1024) {
            const int row = i / units, u = i - (int64_t) row * units;
            ((uint4 *) plan.y)[i] = grouped_convert<T>(p.y + row / p.n_channels * p.sy_token + row % p.n_channels * p.sy_channel + u * 8);
        }
        return;
    }
    __shared__ int next[1024], sums[32], sums_tiles[32];
    const int      tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int      n_pairs = p.n_tokens * p.n_used;
    // loads first, so that they overlap
    const auto each_pair = [&](const auto f) {
        constexpr int batch = 8;
        for (int i0 = tid; i0 < n_pairs; i0 += batch * 1024) {
            int e[batch];
#pragma unroll
            for (int j = 0; j < batch; ++j) {
                const int i = i0 + j * 1024;
                e[j]        = i < n_pairs ? p.ids[(i / p.n_used) * p.si_token + i % p.n_used] : -1;
            }
#pragma unroll
            for (int j = 0; j < batch; ++j) {
                if (e[j] >= 0 && e[j] < p.n_experts) { f(e[j], i0 + j * 1024); }
            }
        }
    };

    next[tid] = 0;
    __syncthreads();
    each_pair([&](const int e, const int) { atomicAdd(next + e, 1); });
    __syncthreads();
    const int n     = next[tid];
    const int tiles = (n + tile_cols - 1) / tile_cols;
    int       a = n, b = tiles;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        const int a1 = __shfl_up_sync(~0u, a, o), b1 = __shfl_up_sync(~0u, b, o);
        a += lane >= o ? a1 : 0;
        b += lane >= o ? b1 : 0;
    }
    if (lane == 31) {
        sums[warp]       = a;
        sums_tiles[warp] = b;
    }
    __syncthreads();
    for (int i = 0; i < warp; ++i) {
        a += sums[i];
        b += sums_tiles[i];
    }
    next[tid] = a - n;
    for (int j = 0; j < tiles; ++j) { plan.tiles[b - tiles + j] = make_int4(tid, a - n + j * tile_cols, min(tile_cols, n - j * tile_cols), 0); }
    if (tid == 1023) { *plan.n_tiles = b; }
    __syncthreads();
    each_pair([&](const int e, const int i) { plan.pairs[atomicAdd(next + e, 1)] = i; });
}

// Many tokens: a block has 128 rows of an expert (with glu 64 of gate and 64 of up, 16 in turns) and up to cols of its pairs.
// mt: how many times 16 rows a warp has; blocks: how many an SM should hold.
template <typename T, bool glu, int cols, int mt, int stages, int blocks>
__launch_bounds__(512 / mt, blocks) static __global__ void mul_mat_f_many(const grouped_args p, const grouped_plan plan) {
    constexpr int           rows = 128, bk = 64, units = bk / 8, stage = (rows + cols) * units;
    constexpr int           at_once = 512 / mt / units; // rows that all threads copy 64 values of
    constexpr int           nw = rows / at_once, ny = cols / at_once;
    extern __shared__ uint4 smem_grouped[];
    __shared__ int          pairs[cols];

    if (blockIdx.y >= *plan.n_tiles) { return; }
    const int4 tile = plan.tiles[blockIdx.y];
    const int  lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    if (threadIdx.x < tile.z) { pairs[threadIdx.x] = plan.pairs[tile.y + threadIdx.x]; }
    __syncthreads();

    // what this thread copies: one unit of 16 bytes of some rows; with glu 16 rows of gate and 16 of up in turns
    const int u = threadIdx.x % units, r = threadIdx.x / units;
    const int row0 = blockIdx.x * (glu ? rows / 2 : rows);
    const T * w[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) { w[i] = (const T *) (glu && (i * at_once + r) / 16 % 2 == 0 ? p.w_gate : p.w) + tile.x * p.sw_expert + u * 8; }
    const T * y = (const T *) plan.y + u * 8;
    int       ow[nw], oy[ny];
#pragma unroll
    for (int i = 0; i < nw; ++i) {
        const int row = i * at_once + r;
        ow[i]         = min(row0 + (glu ? row / 32 * 16 + row % 16 : row), p.rows - 1) * (int) p.sw_row;
    }
#pragma unroll
    for (int i = 0; i < ny; ++i) {
        const int pair = pairs[min(i * at_once + r, tile.z - 1)];
        oy[i]          = (pair / p.n_used * p.n_channels + pair % p.n_used % p.n_channels) * p.k;
    }
    uint4 *    to    = smem_grouped + r * units + (u ^ (r % 2 * 4));
    const int  steps = p.k / bk;
    const auto fetch = [&](const int s) {
        if (s < steps) {
            uint4 * dst = to + s % stages * stage;
#pragma unroll
            for (int i = 0; i < nw; ++i) { grouped_copy(dst + i * at_once * units, w[at_once == 16 ? i % 2 : 0] + ow[i] + s * bk); }
#pragma unroll
            for (int i = 0; i < ny; ++i) {
                if (i * at_once + r < tile.z) { grouped_copy(dst + (rows + i * at_once) * units, y + oy[i] + s * bk); }
            }
        }
        grouped_commit();
    };
#pragma unroll
    for (int s = 0; s < stages - 1; ++s) { fetch(s); }

    // warps side by side have rows, two of them half of the columns that are there
    const int     half = (tile.z + 15) / 16;
    const int     wr = warp % (8 / mt) * mt * 16, wc = warp / (8 / mt) * half * 8;
    const uint4 * fa      = smem_grouped + (wr + g) * units;
    const uint4 * fb      = smem_grouped + (rows + wc + g) * units;
    const int     swizzle = g % 2 * 4;
    const int     row     = row0 + (glu ? wr / 2 : wr) + g;

    const auto run = [&](auto nt_) {
        constexpr int nt             = decltype(nt_)::value;
        float         acc[mt][nt][4] = {};

        for (int s = 0; s < steps; ++s) {
            grouped_wait<stages - 2>();
            __syncthreads();
            fetch(s + stages - 1);
            const int off = s % stages * stage;
#pragma unroll
            for (int k = 0; k < bk / 32; ++k) {
                const int unit = off + ((k * 4 + t) ^ swizzle);
                uint4     a[2 * mt];
#pragma unroll
                for (int i = 0; i < 2 * mt; ++i) { a[i] = fa[i * 8 * units + unit]; }
#pragma unroll
                for (int j = 0; j < nt; ++j) {
                    const uint4 b = fb[j * 8 * units + unit];
#pragma unroll
                    for (int i = 0; i < mt; ++i) { grouped_mma<T>(acc[i][j], a[2 * i].x, a[2 * i + 1].x, a[2 * i].y, a[2 * i + 1].y, b.x, b.y); }
#pragma unroll
                    for (int i = 0; i < mt; ++i) { grouped_mma<T>(acc[i][j], a[2 * i].z, a[2 * i + 1].z, a[2 * i].w, a[2 * i + 1].w, b.z, b.w); }
                }
            }
        }
#pragma unroll
        for (int j = 0; j < 2 * nt; ++j) {
            const int col = wc + j / 2 * 8 + 2 * t + j % 2;
            if (j / 2 >= half || col >= tile.z) { continue; }
            const int pair = pairs[col];
            float *   dst  = p.dst + pair / p.n_used * p.sd_token + pair % p.n_used * p.sd_channel + row;
#pragma unroll
            for (int i = 0; i < (glu ? mt : 2 * mt); ++i) {
                if (row + i * 8 < p.rows) {
                    dst[i * 8] = glu ? grouped_glu(acc[i / 2 * 2][j / 2][i % 2 * 2 + j % 2], acc[i / 2 * 2 + 1][j / 2][i % 2 * 2 + j % 2]) :
                                       acc[i / 2][j / 2][i % 2 * 2 + j % 2];
                }
            }
        }
    };
    constexpr int most = cols / 16;
    if (half <= 1) {
        run(std::integral_constant<int, 1>());
    } else if (half <= 2) {
        run(std::integral_constant < int, most<2 ? most : 2>());
    } else if (half <= 4) {
        run(std::integral_constant < int, most<4 ? most : 4>());
    } else if (half <= 6) {
        run(std::integral_constant < int, most<6 ? most : 6>());
    } else {
        run(std::integral_constant<int, most>());
    }
}

constexpr int few_warps = 4, few_depth = 8;

static size_t grouped_few_nbytes_shared(const int64_t k) { return few_warps * few_depth * 128 * sizeof(uint4) + k * 8 * sizeof(half); }

template <typename T>
static void launch_sort(ggml_backend_cuda_context & ctx, const grouped_args & args, const grouped_plan & plan, const int tile_cols) {
    const size_t n_y      = (size_t) args.n_tokens * args.n_channels * args.k;
    const int    blocks_y = std::min<size_t>((n_y / 8 + 1023) / 1024, 2 * ggml_cuda_info().devices[ctx.device].nsm);
    grouped_sort<T><<<1 + blocks_y, 1024, 0, ctx.stream()>>>(args, plan, tile_cols);
    CUDA_CHECK(cudaGetLastError());
}

void ggml_cuda_grouped_sort_f16(ggml_backend_cuda_context & ctx, const grouped_args & args, const grouped_plan & plan, const int tile_cols) {
    launch_sort<half>(ctx, args, plan, tile_cols);
}

template <typename T, bool glu, int cols, int mt, int stages, int blocks>
static void launch_many(ggml_backend_cuda_context & ctx, const grouped_args & args) {
    const int    n_pairs = args.n_tokens * args.n_used;
    const int    n_tiles = std::min(n_pairs, args.n_experts) + n_pairs / cols; // at most
    const size_t n_y     = (size_t) args.n_tokens * args.n_channels * args.k;

    ggml_cuda_pool_alloc<int4> tiles(ctx.pool(), n_tiles);
    ggml_cuda_pool_alloc<int>  pairs(ctx.pool(), n_pairs + 1);
    ggml_cuda_pool_alloc<T>    y(ctx.pool(), n_y);
    const grouped_plan         plan = { pairs.ptr + n_pairs, tiles.ptr, pairs.ptr, y.ptr };

    launch_sort<T>(ctx, args, plan, cols);

    constexpr size_t nbytes_shared = (128 + cols) * 128 * stages;
    CUDA_SET_SHARED_MEMORY_LIMIT((mul_mat_f_many<T, glu, cols, mt, stages, blocks>), nbytes_shared);
    const int rows = glu ? 64 : 128;
    mul_mat_f_many<T, glu, cols, mt, stages, blocks>
            <<<dim3((args.rows + rows - 1) / rows, n_tiles), 512 / mt, nbytes_shared, ctx.stream()>>>(args, plan);
    CUDA_CHECK(cudaGetLastError());
}

template <typename T, bool glu>
static void launch_grouped(ggml_backend_cuda_context & ctx, const grouped_args & args) {
    const int    n_pairs           = args.n_tokens * args.n_used;
    const size_t nbytes_shared     = grouped_few_nbytes_shared(args.k);
    const size_t nbytes_shared_max = ggml_cuda_info().devices[ctx.device].smpbo - 2048; // beside what is static

    if (args.n_tokens <= GROUPED_FEW_MAX_TOKENS && n_pairs <= GROUPED_FEW_MAX_PAIRS && nbytes_shared <= nbytes_shared_max) {
        constexpr int rows    = (glu ? few_warps / 2 : few_warps) * 16;
        const bool    by_pair = n_pairs <= args.n_experts;
        CUDA_SET_SHARED_MEMORY_LIMIT((mul_mat_f_few<T, glu, few_warps, few_depth, 1>), nbytes_shared_max);
        mul_mat_f_few<T, glu, few_warps, few_depth, 1>
                <<<dim3((args.rows + rows - 1) / rows, by_pair ? n_pairs : args.n_experts), 32 * few_warps, nbytes_shared, ctx.stream()>>>(
                        args, by_pair);
        CUDA_CHECK(cudaGetLastError());
        return;
    }
    if (n_pairs <= 16 * args.n_experts) {
        launch_many<T, glu, 32, 2, 4, 2>(ctx, args);
    } else {
        launch_many<T, glu, 64, 4, 3, 3>(ctx, args);
    }
}

void ggml_cuda_mul_mat_f_grouped(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * gate, const ggml_tensor * src1,
        const ggml_tensor * ids, ggml_tensor * dst) {
    const size_t ts_src0 = ggml_type_size(src0->type);

    grouped_args args;
    args.w          = src0->data;
    args.w_gate     = gate ? gate->data : nullptr;
    args.sw_row     = src0->nb[1] / ts_src0;
    args.sw_expert  = src0->nb[2] / ts_src0;
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

    if (src0->type == GGML_TYPE_F16) {
        gate ? launch_grouped<half, true>(ctx, args) : launch_grouped<half, false>(ctx, args);
    } else {
        gate ? launch_grouped<nv_bfloat16, true>(ctx, args) : launch_grouped<nv_bfloat16, false>(ctx, args);
    }
}

bool ggml_cuda_should_use_mmf_grouped(const ggml_tensor * dst, const int cc) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    const ggml_tensor * ids  = dst->src[2];

    static const char * env_c      = getenv("GGML_CUDA_MMF_GROUPED_MIN");
    const int64_t       min_tokens = env_c ? std::atoll(env_c) : 1;

    const auto aligned = [](const ggml_tensor * t) { return t->nb[1] % 16 == 0 && t->nb[2] % 16 == 0 && (uintptr_t) t->data % 16 == 0; };
    return GGML_CUDA_CC_IS_NVIDIA(cc) && ampere_mma_available(cc) && ids->ne[1] >= min_tokens &&
           (src0->type == GGML_TYPE_F16 || src0->type == GGML_TYPE_BF16) && src1->type == GGML_TYPE_F32 && dst->type == GGML_TYPE_F32 &&
           src0->nb[0] == ggml_type_size(src0->type) && src1->nb[0] == sizeof(float) && dst->nb[0] == sizeof(float) && ids->nb[0] == sizeof(int) &&
           aligned(src0) && aligned(src1) && src0->ne[0] % 64 == 0 && src0->ne[2] <= GROUPED_MAX_EXPERTS && src0->ne[3] == 1 && src1->ne[3] == 1 &&
           src0->nb[2] / sizeof(half) <= INT_MAX && src0->ne[1] <= INT_MAX && ggml_nelements(src1) <= INT_MAX &&
           ggml_nelements(ids) / 32 + GROUPED_MAX_EXPERTS <= 65535;
}
