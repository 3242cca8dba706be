#include "mmf-wgmma.cuh"

#include "bulk-copy.cuh"
#include "cluster-launch.cuh"
#include "cp-async.cuh"
#include "mmf-grouped.cuh"

#include <type_traits>

#ifdef GGML_CUDA_USE_PDL
#include <cooperative_groups.h>

// Experts from gate and up to the weighted sum with Hopper's wgmma. native.cmake compiles this file for sm_90a, too.
//
// Pairs of a token and an expert are sorted by expert once; what gate and up make and what down makes are rows of BF16 in that order. In the
//     products a block stays on its multiprocessor and computes one tile after the other: some rows of an expert's weights and up to
//     cols of its pairs. One warpgroup copies 64 values of K of both into a ring of stages, and goes on with the next tile while the two
//     others multiply. With glu a group of 16 rows in the ring is 8 rows of gate and the same 8 of up, which a thread then has beside each
//     other.

constexpr int WGMMA_K       = 64; // of a stage: 128 bytes of a row, whose units of 16 lie in the order of SWIZZLE_128B
constexpr int WGMMA_THREADS = 3 * 128;
constexpr int WGMMA_MT = 2, WGMMA_COLS = 128; // of the kernels that are used
constexpr int WGMMA_SORT_BLOCKS = 8;          // a cluster
constexpr int WGMMA_MIN_TOKENS  = 256;

static constexpr __host__ __device__ int wgmma_rows(const int mt) { return 128 * mt; } // in the ring; mt: times 64 rows of a warpgroup
static constexpr __host__ __device__ int wgmma_stage(const int mt, const int cols) { return (wgmma_rows(mt) + cols) * WGMMA_K * 2; }
static constexpr __host__ __device__ int wgmma_stages(const int mt, const int cols) { return (224 * 1024 - 1024) / wgmma_stage(mt, cols); }
static constexpr __host__ __device__ int wgmma_nbytes_shared(const int mt, const int cols) {
    return wgmma_stages(mt, cols) * wgmma_stage(mt, cols) + 1024;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

static __device__ __forceinline__ void wgmma_copy(const uint32_t dst, const void * src) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

// K-major rows of 128 bytes, groups of 8 rows behind each other
static __device__ __forceinline__ uint64_t wgmma_descriptor(const uint32_t src) {
    return (uint64_t) 1 << 62 | (uint64_t) (1024 >> 4) << 32 | (uint64_t) 1 << 16 | (src & 0x3FFFF) >> 4;
}

#define WGMMA_C8(c, i)  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define WGMMA_C16(c, i) WGMMA_C8(c, i), WGMMA_C8(c, i + 8)
#define WGMMA_C24(c, i) WGMMA_C16(c, i), WGMMA_C8(c, i + 16)
#define WGMMA_C32(c, i) WGMMA_C16(c, i), WGMMA_C16(c, i + 16)
#define WGMMA_C40(c, i) WGMMA_C32(c, i), WGMMA_C8(c, i + 32)
#define WGMMA_C48(c, i) WGMMA_C32(c, i), WGMMA_C16(c, i + 32)
#define WGMMA_C56(c, i) WGMMA_C48(c, i), WGMMA_C8(c, i + 48)
#define WGMMA_C64(c, i) WGMMA_C32(c, i), WGMMA_C32(c, i + 32)

#define WGMMA_R8  "%0,%1,%2,%3,%4,%5,%6,%7"
#define WGMMA_R16 WGMMA_R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_R24 WGMMA_R16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_R32 WGMMA_R24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_R40 WGMMA_R32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_R48 WGMMA_R40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_R56 WGMMA_R48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define WGMMA_R64 WGMMA_R56 ",%56,%57,%58,%59,%60,%61,%62,%63"

// n columns, r = n/2 values of a thread, which are operands 0 to r - 1; a, b: the operands behind them
#define WGMMA_CASE(n, r, a, b)                                                                                                          \
    if constexpr (nt == n / 16) {                                                                                                       \
        asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"                                                                         \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" WGMMA_R##r "}, %" #a ", %" #b ", p, 1, 1, 0, 0;\n}\n" \
                : WGMMA_C##r(c, 0)                                                                                                      \
                : "l"(da), "l"(db));                                                                                                    \
    }

// c += a*b: 64 rows, 16 values of K, 16*nt columns
template <int nt>
static __device__ __forceinline__ void wgmma_multiply(float (&c)[8 * nt], const uint64_t da, const uint64_t db) {
    WGMMA_CASE(16, 8, 8, 9)
    WGMMA_CASE(32, 16, 16, 17)
    WGMMA_CASE(48, 24, 24, 25)
    WGMMA_CASE(64, 32, 32, 33)
    WGMMA_CASE(80, 40, 40, 41)
    WGMMA_CASE(96, 48, 48, 49)
    WGMMA_CASE(112, 56, 56, 57)
    WGMMA_CASE(128, 64, 64, 65)
}

static __device__ __forceinline__ float wgmma_glu(const float gate, const float up) { return gate / (1.0f + expf(-gate)) * up; }

static __device__ __forceinline__ uint32_t wgmma_pack(const float a, const float b) {
    const nv_bfloat162 x = __floats2bfloat162_rn(a, b);
    return *(const uint32_t *) &x;
}

static __device__ __forceinline__ uint4 wgmma_convert(const float4 * src) {
    const float4 a = src[0], b = src[1];
    return make_uint4(wgmma_pack(a.x, a.y), wgmma_pack(a.z, a.w), wgmma_pack(b.x, b.y), wgmma_pack(b.z, b.w));
}

// x0, x1: a row of two columns; odd: whether the row is. Lanes of even rows write two rows of the first column, the others of the second.
static __device__ __forceinline__ void wgmma_store(nv_bfloat16 * dst, const float x0, const float x1, const int odd, const bool fits) {
    const float other = __shfl_xor_sync(~0u, odd ? x0 : x1, 4);
    if (fits) { *(uint32_t *) dst = odd ? wgmma_pack(other, x1) : wgmma_pack(x0, other); }
}

#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The first cluster sorts pairs by expert, in no fixed order for each, and makes tiles of them. The others convert the tokens. place: where a
//     pair is in that order, -1 if its expert isn't there.
__launch_bounds__(1024) static __global__ void wgmma_sort(const grouped_args p, const grouped_plan plan, int * place, const int tile_cols) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const int tid = threadIdx.x;
    ggml_cuda_pdl_sync();
    if (blockIdx.x >= WGMMA_SORT_BLOCKS) {
        const int     units = p.k / 8;
        const int64_t all   = (int64_t) p.n_tokens * units;
        for (int64_t i = (int64_t) (blockIdx.x - WGMMA_SORT_BLOCKS) * 1024 + tid; i < all; i += (int64_t) (gridDim.x - WGMMA_SORT_BLOCKS) * 1024) {
            const int token       = i / units;
            ((uint4 *) plan.y)[i] = wgmma_convert((const float4 *) (p.y + token * p.sy_token + (i - (int64_t) token * units) * 8));
        }
        return;
    }
    __shared__ int counts[1024], next[1024], sums[32], sums_tiles[32];
    const auto     cluster = cooperative_groups::this_cluster();
    const int      lane = tid % 32, warp = tid / 32, rank = blockIdx.x;
    const int      share = (p.n_tokens + WGMMA_SORT_BLOCKS - 1) / WGMMA_SORT_BLOCKS * p.n_used; // pairs of a block
    const int      end   = min((rank + 1) * share, p.n_tokens * p.n_used);
    const auto     each  = [&](const auto f) {
        for (int i = rank * share + tid; i < end; i += 1024) {
            const int e = p.ids[(i / p.n_used) * p.si_token + i % p.n_used];
            f(e < p.n_experts ? e : -1, i);
        }
    };
    counts[tid] = 0;
    __syncthreads();
    each([&](const int e, const int) {
        if (e >= 0) { atomicAdd(counts + e, 1); }
    });
    cluster.sync();
    int n = 0, before = 0;
#pragma unroll
    for (int i = 0; i < WGMMA_SORT_BLOCKS; ++i) {
        const int m = *cluster.map_shared_rank(counts + tid, i);
        n += m;
        before += i < rank ? m : 0;
    }
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
    next[tid] = a - n + before;
    if (rank == 0) {
        for (int j = 0; j < tiles; ++j) { plan.tiles[b - tiles + j] = make_int4(tid, a - n + j * tile_cols, min(tile_cols, n - j * tile_cols), 0); }
        if (tid == 1023) { *plan.n_tiles = b; }
    }
    cluster.sync(); // counts are read
    each([&](const int e, const int i) {
        const int at = e >= 0 ? atomicAdd(next + e, 1) : -1;
        if (at >= 0) { plan.pairs[at] = i; }
        place[i] = at;
    });
#else
    GGML_UNUSED_VARS(p, plan, place, tile_cols);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

// Rows of tokens, weighted sums of those of their pairs. A thread has 8 values.
__launch_bounds__(256) static __global__ void wgmma_sum(
        const nv_bfloat16 * h, const int * place, const float * weights, float * dst, const int rows, const int n_used) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const int row = (blockIdx.x * 256 + threadIdx.x) * 8, token = blockIdx.y;
    if (row >= rows) { return; }
    float sum[8] = {};
    for (int j0 = 0; j0 < n_used; j0 += 8) {
        uint4 x[8];
        float w[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int i  = token * n_used + min(j0 + j, n_used - 1);
            const int at = place[i];
            x[j]         = *(const uint4 *) (h + (int64_t) max(at, 0) * rows + row);
            w[j]         = j0 + j < n_used && at >= 0 ? weights[i] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
            for (int l = 0; l < 8; ++l) { sum[l] += w[j] * (float) ((const nv_bfloat16 *) &x[j])[l]; }
        }
    }
    float4 * to = (float4 *) (dst + (int64_t) token * rows + row);
    to[0]       = make_float4(sum[0], sum[1], sum[2], sum[3]);
    to[1]       = make_float4(sum[4], sum[5], sum[6], sum[7]);
#else
    GGML_UNUSED_VARS(h, place, weights, dst, rows, n_used);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

// p.rows is a multiple of the rows of a tile (with glu of half of them) and p.k of WGMMA_K. dst has rows of BF16 for the sorted pairs; y with
//     glu a row for each token, else for each sorted pair.
template <bool glu, int mt, int cols>
__launch_bounds__(WGMMA_THREADS, 1) static __global__ void mul_mat_f_wgmma(const grouped_args p, const grouped_plan plan) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int rows = wgmma_rows(mt), stage = wgmma_stage(mt, cols), stages = wgmma_stages(mt, cols), tile_rows = glu ? rows / 2 : rows;
    static_assert(cols % 16 == 0 && cols <= 128 && stages >= 2, "a tile's columns are those of one instruction");

    extern __shared__ char wgmma_smem[];
    __shared__ uint64_t    barriers[2 * stages];

    const uint32_t full = ggml_cuda_cvta_generic_to_shared(barriers), empty = full + 8 * stages;
    const uint32_t ring  = GGML_PAD(ggml_cuda_cvta_generic_to_shared(wgmma_smem), 1024);
    const int      group = threadIdx.x / 128, lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (int s = 0; s < stages; ++s) {
            bulk_barrier_init(full + 8 * s, 128);
            bulk_barrier_init(empty + 8 * s, 8);
        }
        bulk_barrier_init_fence();
    }
    __syncthreads();

    const int  blocks = p.rows / tile_rows; // of rows
    const int  tiles  = *plan.n_tiles * blocks;
    const int  steps  = p.k / WGMMA_K;
    int        s = 0, phase = 0; // of the ring
    const auto next = [&]() {
        if (++s == stages) {
            s = 0;
            phase ^= 1;
        }
    };

    if (group == 2) { // copies
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        constexpr int       nw = rows / 16, ny = cols / 16;
        const int           u = threadIdx.x % 8, r = threadIdx.x / 8 % 16;
        const nv_bfloat16 * w      = (const nv_bfloat16 *) (glu && r < 8 ? p.w_gate : p.w) + (glu ? r % 8 : r) * p.sw_row + u * 8;
        const int64_t       w_step = (glu ? 8 : 16) * p.sw_row;
        const nv_bfloat16 * y      = (const nv_bfloat16 *) plan.y + u * 8;
        const int           to     = r * 128 + (u ^ r % 8) * 16;
        for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
            const int4          tile = plan.tiles[i / blocks];
            const nv_bfloat16 * from = w + tile.x * p.sw_expert + (int64_t) (i % blocks) * tile_rows * p.sw_row;
            int                 of[ny]; // row of y
#pragma unroll
            for (int j = 0; j < ny; ++j) {
                of[j] = tile.y + min(j * 16 + r, tile.z - 1);
                if (glu) { of[j] = plan.pairs[of[j]] / p.n_used; }
            }
            for (int k = 0; k < steps; ++k) {
                bulk_barrier_wait(empty + 8 * s, phase ^ 1);
                const uint32_t dst = ring + s * stage + to;
#pragma unroll
                for (int j = 0; j < nw; ++j) { wgmma_copy(dst + j * 2048, from + j * w_step + k * WGMMA_K); }
#pragma unroll
                for (int j = 0; j < ny; ++j) {
                    if (j * 16 + r < tile.z) { wgmma_copy(dst + rows * 128 + j * 2048, y + (int64_t) of[j] * p.k + k * WGMMA_K); }
                }
                asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full + 8 * s) : "memory");
                next();
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int  warp = threadIdx.x % 128 / 32, g = lane / 4, t = lane % 4;
    const auto release = [&](const int of) {
        if (lane == 0) { bulk_barrier_arrive(empty + 8 * of); }
    };
    for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
        const int4 tile = plan.tiles[i / blocks];
        const int  row0 = i % blocks * tile_rows;

        const auto run = [&](auto nt_) {
            constexpr int nt              = decltype(nt_)::value;
            float         acc[mt][8 * nt] = {};
            int           last            = -1;
            for (int k = 0; k < steps; ++k) {
                bulk_barrier_wait(full + 8 * s, phase);
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                const uint64_t a = wgmma_descriptor(ring + s * stage + group * 64 * 128);
                const uint64_t b = wgmma_descriptor(ring + s * stage + rows * 128);
#pragma unroll
                for (int j = 0; j < WGMMA_K / 16; ++j) {
#pragma unroll
                    for (int m = 0; m < mt; ++m) { wgmma_multiply<nt>(acc[m], a + m * (128 * 128 >> 4) + 2 * j, b + 2 * j); }
                }
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (last >= 0) { release(last); }
                last = s;
                next();
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            release(last);
#pragma unroll
            for (int m = 0; m < mt; ++m) {
#pragma unroll
                for (int j = 0; j < 8 * nt; ++j) { asm volatile("" : "+f"(acc[m][j])::"memory"); }
            }
#pragma unroll
            for (int j = 0; j < 2 * nt; ++j) {
                // a lane and the one with the next row exchange columns, so that each has two rows of one
                const int     col = j * 8 + 2 * t + g % 2;
                nv_bfloat16 * dst = (nv_bfloat16 *) p.dst + (int64_t) (tile.y + col) * p.rows + row0 + g / 2 * 2;
#pragma unroll
                for (int m = 0; m < mt; ++m) {
                    const int     at = (m * 2 + group) * 64 + warp * 16; // in the ring
                    const float * c  = acc[m] + 4 * j;
                    if constexpr (glu) {
                        const float x0 = wgmma_glu(c[0], c[2]), x1 = wgmma_glu(c[1], c[3]);
                        wgmma_store(dst + at / 2, x0, x1, g % 2, col < tile.z);
                    } else {
                        wgmma_store(dst + at, c[0], c[1], g % 2, col < tile.z);
                        wgmma_store(dst + at + 8, c[2], c[3], g % 2, col < tile.z);
                    }
                }
            }
        };
        const int     nt   = (tile.z + 15) / 16;
        constexpr int most = cols / 16;
        if (most == 1 || nt <= 1) {
            run(std::integral_constant<int, 1>());
        } else if (most == 2 || nt == 2) {
            run(std::integral_constant < int, most<2 ? most : 2>());
        } else if (nt == 3) {
            run(std::integral_constant < int, most<3 ? most : 3>());
        } else if (most == 4 || nt == 4) {
            run(std::integral_constant < int, most<4 ? most : 4>());
        } else if (nt == 5) {
            run(std::integral_constant < int, most<5 ? most : 5>());
        } else if (nt == 6) {
            run(std::integral_constant < int, most<6 ? most : 6>());
        } else if (nt == 7) {
            run(std::integral_constant < int, most<7 ? most : 7>());
        } else {
            run(std::integral_constant<int, most>());
        }
    }
#else
    GGML_UNUSED_VARS(p, plan);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

template <bool glu, int mt, int cols>
static void launch_wgmma(const grouped_args & p, const grouped_plan & plan, const int nsm, cudaStream_t stream) {
    constexpr int nbytes_shared = wgmma_nbytes_shared(mt, cols);
    CUDA_SET_SHARED_MEMORY_LIMIT((mul_mat_f_wgmma<glu, mt, cols>), nbytes_shared);
    mul_mat_f_wgmma<glu, mt, cols><<<nsm, WGMMA_THREADS, nbytes_shared, stream>>>(p, plan);
    CUDA_CHECK(cudaGetLastError());
}

// Whether the code that was loaded is that for sm_90a: any other is empty, which takes few registers.
static bool wgmma_is_there(const int device) {
    static int found[GGML_CUDA_MAX_DEVICES] = {};
    if (found[device] == 0) {
        cudaFuncAttributes attributes;
        const cudaError_t  error = cudaFuncGetAttributes(&attributes, mul_mat_f_wgmma<true, WGMMA_MT, WGMMA_COLS>);
        if (error != cudaSuccess) { (void) cudaGetLastError(); }
        found[device] = error == cudaSuccess && attributes.numRegs > 64 ? 1 : -1;
    }
    return found[device] > 0;
}

bool ggml_cuda_can_fuse_wgmma(const ggml_tensor * gate, const ggml_tensor * up, const ggml_tensor * glu, const ggml_tensor * down,
        const ggml_tensor * weights, const ggml_tensor * dst, const int cc) {
    static const char * env_c      = getenv("GGML_CUDA_MMF_WGMMA_MIN");
    const int64_t       min_tokens = env_c ? std::atoll(env_c) : WGMMA_MIN_TOKENS;

    const ggml_tensor * x    = up->src[1];
    const ggml_tensor * ids  = up->src[2];
    const ggml_tensor * w    = up->src[0];
    const int           rows = wgmma_rows(WGMMA_MT);
    const auto          is_w = [&](const ggml_tensor * t, const int64_t multiple) {
        return t->type == w->type && ggml_is_contiguous(t) && (uintptr_t) t->data % 16 == 0 && t->ne[0] % WGMMA_K == 0 && t->ne[1] % multiple == 0 &&
               t->ne[2] == w->ne[2] && t->ne[3] == 1;
    };
    return cc == GGML_CUDA_CC_HOPPER && ids->ne[1] >= min_tokens && w->type == GGML_TYPE_BF16 && is_w(gate->src[0], rows / 2) && is_w(w, rows / 2) &&
           is_w(down->src[0], rows) && ggml_are_same_shape(gate->src[0], w) && down->src[0]->ne[0] == w->ne[1] && w->ne[2] <= GROUPED_MAX_EXPERTS &&
           !ggml_is_batch_invariant(gate) && !ggml_is_batch_invariant(up) && !ggml_is_batch_invariant(down) && glu->src[0] == gate &&
           glu->src[1] == up && down->src[1] == glu && ggml_get_glu_op(glu) == GGML_GLU_OP_SWIGLU && gate->src[1] == x && gate->src[2] == ids &&
           down->src[2] == ids && ids->nb[0] == sizeof(int) && ids->ne[2] * ids->ne[3] == 1 && ids->ne[1] <= 65535 && x->type == GGML_TYPE_F32 &&
           x->nb[0] == sizeof(float) && x->ne[1] == 1 && x->ne[3] == 1 && x->nb[2] % 16 == 0 && (uintptr_t) x->data % 16 == 0 &&
           weights->type == GGML_TYPE_F32 && ggml_is_contiguous(weights) && dst->type == GGML_TYPE_F32 && ggml_is_contiguous(dst) &&
           wgmma_is_there(ggml_cuda_get_device());
}

void ggml_cuda_mul_mat_f_wgmma(ggml_backend_cuda_context & ctx, const ggml_tensor * gate, const ggml_tensor * up, const ggml_tensor * down,
        const ggml_tensor * weights, ggml_tensor * dst) {
    const ggml_tensor * w      = up->src[0];
    const ggml_tensor * x      = up->src[1];
    const ggml_tensor * ids    = up->src[2];
    const int           nsm    = ggml_cuda_info().devices[ctx.device].nsm;
    cudaStream_t        stream = ctx.stream();

    grouped_args args{};
    args.w         = w->data;
    args.w_gate    = gate->src[0]->data;
    args.sw_row    = w->ne[0];
    args.sw_expert = w->ne[0] * w->ne[1];
    args.y         = (const float *) x->data;
    args.sy_token  = x->nb[2] / sizeof(float);
    args.ids       = (const int *) ids->data;
    args.si_token  = ids->nb[1] / sizeof(int);
    args.k         = w->ne[0];
    args.rows      = w->ne[1];
    args.n_tokens  = ids->ne[1];
    args.n_used    = ids->ne[0];
    args.n_experts = w->ne[2];

    const int                         n_pairs = args.n_tokens * args.n_used;
    ggml_cuda_pool_alloc<int4>        tiles(ctx.pool(), std::min(n_pairs, args.n_experts) + n_pairs / WGMMA_COLS);
    ggml_cuda_pool_alloc<int>         pairs(ctx.pool(), 2 * n_pairs + 1);
    ggml_cuda_pool_alloc<nv_bfloat16> y(ctx.pool(), (size_t) args.n_tokens * args.k);
    ggml_cuda_pool_alloc<nv_bfloat16> h(ctx.pool(), (size_t) n_pairs * args.rows);
    ggml_cuda_pool_alloc<nv_bfloat16> out(ctx.pool(), (size_t) n_pairs * down->ne[0]);
    int *                             place = pairs.ptr + n_pairs;
    grouped_plan                      plan  = { place + n_pairs, tiles.ptr, pairs.ptr, y.ptr };

    const int64_t n_convert = std::min<int64_t>((int64_t) args.n_tokens * args.k / 8 / 1024 + 1, 2 * nsm);
    const dim3    blocks(WGMMA_SORT_BLOCKS + GGML_PAD(n_convert, WGMMA_SORT_BLOCKS));
    ggml_cuda_kernel_launch_clusters(
            wgmma_sort, ggml_cuda_kernel_launch_params(blocks, dim3(1024), 0, stream), dim3(WGMMA_SORT_BLOCKS, 1, 1), args, plan, place, WGMMA_COLS);

    args.dst = (float *) h.ptr;
    launch_wgmma<true, WGMMA_MT, WGMMA_COLS>(args, plan, nsm, stream);

    args.w         = down->src[0]->data;
    args.k         = args.rows;
    args.rows      = down->src[0]->ne[1];
    args.sw_row    = args.k;
    args.sw_expert = (int64_t) args.k * args.rows;
    args.dst       = (float *) out.ptr;
    plan.y         = h.ptr;
    launch_wgmma<false, WGMMA_MT, WGMMA_COLS>(args, plan, nsm, stream);

    wgmma_sum<<<dim3((args.rows / 8 + 255) / 256, args.n_tokens), 256, 0, stream>>>(
            out.ptr, place, (const float *) weights->data, (float *) dst->data, args.rows, args.n_used);
    CUDA_CHECK(cudaGetLastError());
}
#else
bool ggml_cuda_can_fuse_wgmma(
        const ggml_tensor *, const ggml_tensor *, const ggml_tensor *, const ggml_tensor *, const ggml_tensor *, const ggml_tensor *, int) {
    return false;
}

void ggml_cuda_mul_mat_f_wgmma(
        ggml_backend_cuda_context &, const ggml_tensor *, const ggml_tensor *, const ggml_tensor *, const ggml_tensor *, ggml_tensor *) {
    GGML_ABORT("built without clusters");
}
#endif // GGML_CUDA_USE_PDL
