#include "mmf-wgmma.cuh"

#include "bulk-copy.cuh"
#include "cp-async.cuh"
#include "mmf-grouped.cuh"

#include <type_traits>

// Experts from gate and up to down with Hopper's wgmma. native.cmake compiles this file for sm_90a, too.
//
// A block stays on its multiprocessor and computes one tile after the other: some rows of an expert's weights and up to cols of its
//     pairs. One warpgroup copies 64 values of K of both into a ring of stages, and goes on with the next tile while the two others
//     multiply. With glu a group of 16 rows in the ring is 8 rows of gate and the same 8 of up, which a thread then has beside each
//     other; what comes out are rows in the order of the sorted pairs, which down reads.

constexpr int WGMMA_K       = 64; // of a stage: 128 bytes of a row, whose units of 16 lie in the order of SWIZZLE_128B
constexpr int WGMMA_THREADS = 3 * 128;
constexpr int WGMMA_MT = 2, WGMMA_COLS = 128; // of the kernels that are used
constexpr int WGMMA_MIN_TOKENS = 256;

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
#define WGMMA_CASE(n, r, a, b)                                                                                                              \
    if constexpr (nt == n / 16) {                                                                                                           \
        if constexpr (std::is_same_v<T, half>) {                                                                                            \
            asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"                                                                         \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" WGMMA_R##r "}, %" #a ", %" #b ", p, 1, 1, 0, 0;\n}\n"   \
                    : WGMMA_C##r(c, 0)                                                                                                      \
                    : "l"(da), "l"(db));                                                                                                    \
        } else {                                                                                                                            \
            asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"                                                                         \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" WGMMA_R##r "}, %" #a ", %" #b ", p, 1, 1, 0, 0;\n}\n" \
                    : WGMMA_C##r(c, 0)                                                                                                      \
                    : "l"(da), "l"(db));                                                                                                    \
        }                                                                                                                                   \
    }

// c += a*b: 64 rows, 16 values of K, 16*nt columns
template <typename T, int nt>
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

#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)

// p.rows is a multiple of the rows of a tile (with glu of half of them) and p.k of WGMMA_K. With glu y has a row for each token and dst is
//     rows of T for the sorted pairs, else y is these rows and dst a row of floats for each pair.
template <typename T, bool glu, int mt, int cols>
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
        constexpr int nw = rows / 16, ny = cols / 16;
        const int     u = threadIdx.x % 8, r = threadIdx.x / 8 % 16;
        const T *     w      = (const T *) (glu && r < 8 ? p.w_gate : p.w) + (glu ? r % 8 : r) * p.sw_row + u * 8;
        const int64_t w_step = (glu ? 8 : 16) * p.sw_row;
        const T *     y      = (const T *) plan.y + u * 8;
        const int     to     = r * 128 + (u ^ r % 8) * 16;
        for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
            const int4 tile = plan.tiles[i / blocks];
            const T *  from = w + tile.x * p.sw_expert + (int64_t) (i % blocks) * tile_rows * p.sw_row;
            int        of[ny]; // row of y
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
                    for (int m = 0; m < mt; ++m) { wgmma_multiply<T, nt>(acc[m], a + m * (128 * 128 >> 4) + 2 * j, b + 2 * j); }
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
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int col = j * 8 + 2 * t + h;
                    if (col >= tile.z) { continue; }
#pragma unroll
                    for (int m = 0; m < mt; ++m) {
                        const int at = (m * 2 + group) * 64 + warp * 16; // in the ring
                        if constexpr (glu) {
                            const float gate = acc[m][4 * j + h], up = acc[m][4 * j + 2 + h];
                            const float x   = gate / (1.0f + expf(-gate)) * up;
                            T *         dst = (T *) p.dst + (int64_t) (tile.y + col) * p.rows + row0 + at / 2 + g;
                            if constexpr (std::is_same_v<T, half>) {
                                *dst = __float2half_rn(x);
                            } else {
                                *dst = __float2bfloat16_rn(x);
                            }
                        } else {
                            float * dst = p.dst + (int64_t) plan.pairs[tile.y + col] * p.rows + row0 + at + g;
                            dst[0]      = acc[m][4 * j + h];
                            dst[8]      = acc[m][4 * j + 2 + h];
                        }
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

template <typename T, bool glu, int mt, int cols>
static void launch_wgmma(const grouped_args & p, const grouped_plan & plan, const int nsm, cudaStream_t stream) {
    constexpr int nbytes_shared = wgmma_nbytes_shared(mt, cols);
    CUDA_SET_SHARED_MEMORY_LIMIT((mul_mat_f_wgmma<T, glu, mt, cols>), nbytes_shared);
    mul_mat_f_wgmma<T, glu, mt, cols><<<nsm, WGMMA_THREADS, nbytes_shared, stream>>>(p, plan);
    CUDA_CHECK(cudaGetLastError());
}

// Whether the code that was loaded is that for sm_90a: any other is empty, which takes few registers.
static bool wgmma_is_there(const int device) {
    static int found[GGML_CUDA_MAX_DEVICES] = {};
    if (found[device] == 0) {
        cudaFuncAttributes attributes;
        const cudaError_t  error = cudaFuncGetAttributes(&attributes, mul_mat_f_wgmma<nv_bfloat16, true, WGMMA_MT, WGMMA_COLS>);
        if (error != cudaSuccess) { (void) cudaGetLastError(); }
        found[device] = error == cudaSuccess && attributes.numRegs > 64 ? 1 : -1;
    }
    return found[device] > 0;
}

bool ggml_cuda_can_fuse_wgmma(const ggml_tensor * gate, const ggml_tensor * up, const ggml_tensor * glu, const ggml_tensor * down, const int cc) {
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
    return cc == GGML_CUDA_CC_HOPPER && ids->ne[1] >= min_tokens && (w->type == GGML_TYPE_F16 || w->type == GGML_TYPE_BF16) &&
           is_w(gate->src[0], rows / 2) && is_w(w, rows / 2) && is_w(down->src[0], rows) && ggml_are_same_shape(gate->src[0], w) &&
           down->src[0]->ne[0] == w->ne[1] && w->ne[2] <= GROUPED_MAX_EXPERTS && !ggml_is_batch_invariant(gate) && !ggml_is_batch_invariant(up) &&
           !ggml_is_batch_invariant(down) && glu->src[0] == gate && glu->src[1] == up && down->src[1] == glu &&
           ggml_get_glu_op(glu) == GGML_GLU_OP_SWIGLU && gate->src[1] == x && gate->src[2] == ids && down->src[2] == ids &&
           ids->nb[0] == sizeof(int) && ids->ne[2] * ids->ne[3] == 1 && ggml_nelements(ids) <= INT_MAX / 2 && x->type == GGML_TYPE_F32 &&
           x->nb[0] == sizeof(float) && x->ne[1] == 1 && x->ne[3] == 1 && x->nb[2] % 16 == 0 && (uintptr_t) x->data % 16 == 0 &&
           down->type == GGML_TYPE_F32 && ggml_is_contiguous(down) && wgmma_is_there(ggml_cuda_get_device());
}

template <typename T>
static void wgmma_experts(ggml_backend_cuda_context & ctx, const ggml_tensor * gate, const ggml_tensor * up, ggml_tensor * down) {
    const ggml_tensor * w   = up->src[0];
    const ggml_tensor * x   = up->src[1];
    const ggml_tensor * ids = up->src[2];
    const int           nsm = ggml_cuda_info().devices[ctx.device].nsm;

    grouped_args args{};
    args.w          = w->data;
    args.w_gate     = gate->src[0]->data;
    args.sw_row     = w->ne[0];
    args.sw_expert  = w->ne[0] * w->ne[1];
    args.y          = (const float *) x->data;
    args.sy_channel = x->nb[1] / sizeof(float);
    args.sy_token   = x->nb[2] / sizeof(float);
    args.ids        = (const int *) ids->data;
    args.si_token   = ids->nb[1] / sizeof(int);
    args.k          = w->ne[0];
    args.rows       = w->ne[1];
    args.n_tokens   = ids->ne[1];
    args.n_used     = ids->ne[0];
    args.n_channels = 1;
    args.n_experts  = w->ne[2];

    const int                  n_pairs = args.n_tokens * args.n_used;
    ggml_cuda_pool_alloc<int4> tiles(ctx.pool(), std::min(n_pairs, args.n_experts) + n_pairs / WGMMA_COLS);
    ggml_cuda_pool_alloc<int>  pairs(ctx.pool(), n_pairs + 1);
    ggml_cuda_pool_alloc<T>    y(ctx.pool(), (size_t) args.n_tokens * args.k);
    ggml_cuda_pool_alloc<T>    h(ctx.pool(), (size_t) n_pairs * args.rows);
    grouped_plan               plan = { pairs.ptr + n_pairs, tiles.ptr, pairs.ptr, y.ptr };
    ggml_cuda_grouped_sort(ctx, w->type, args, plan, WGMMA_COLS);

    args.dst = (float *) h.ptr;
    launch_wgmma<T, true, WGMMA_MT, WGMMA_COLS>(args, plan, nsm, ctx.stream());

    args.w         = down->src[0]->data;
    args.k         = args.rows;
    args.rows      = down->src[0]->ne[1];
    args.sw_row    = args.k;
    args.sw_expert = (int64_t) args.k * args.rows;
    args.dst       = (float *) down->data;
    plan.y         = h.ptr;
    launch_wgmma<T, false, WGMMA_MT, WGMMA_COLS>(args, plan, nsm, ctx.stream());
}

void ggml_cuda_mul_mat_f_wgmma(ggml_backend_cuda_context & ctx, const ggml_tensor * gate, const ggml_tensor * up, ggml_tensor * down) {
    up->src[0]->type == GGML_TYPE_F16 ? wgmma_experts<half>(ctx, gate, up, down) : wgmma_experts<nv_bfloat16>(ctx, gate, up, down);
}
