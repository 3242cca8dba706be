#include "moe-router.cuh"

// A block has two rows of weights, requested before the columns are there. The last block that is done chooses the experts.

static constexpr int MOE_ROUTER_WARPS   = 8;
static constexpr int MOE_ROUTER_ROWS    = 2; // of a block
static constexpr int MOE_ROUTER_EXPERTS = 256;
static constexpr int MOE_ROUTER_TOKENS  = 16;
static constexpr int MOE_ROUTER_K       = 8 * 32 * MOE_ROUTER_WARPS;

struct moe_router_params {
    const float * w;      // of the router
    const float * w_gate; // of the shared expert's gate, or nullptr
    const float * x;
    float *       logits; // tokens x experts
    float *       gate;
    float *       weights; // tokens x n_used
    int *         ids;     // tokens x experts, the first n_used of each
    int *         arrived; // 0 before and after
    int           n_tokens;
    int           n_used;
    float         clamp;
    float         scale;
    bool          early; // nothing in front of this kernel writes the rows
};

// The sums over all lanes of n values, at most 32: afterwards a lane has value lane % n in v[0].
template <int n, int size>
static __device__ __forceinline__ void moe_router_sum(float (&v)[size], const int lane) {
    if constexpr (n > 1) {
        const bool upper = lane & (n / 2);
#pragma unroll
        for (int i = 0; i < n / 2; ++i) {
            const float send = upper ? v[i] : v[i + n / 2];
            const float keep = upper ? v[i + n / 2] : v[i];
            v[i]             = keep + __shfl_xor_sync(0xFFFFFFFF, send, n / 2);
        }
        moe_router_sum<n / 2>(v, lane);
    } else {
#pragma unroll
        for (int o = size; o < 32; o *= 2) { v[0] += __shfl_xor_sync(0xFFFFFFFF, v[0], o); }
    }
}

template <int nt> // columns at most
static __global__ void __launch_bounds__(32 * MOE_ROUTER_WARPS) moe_router(const moe_router_params p) {
#ifdef AMPERE_MMA_AVAILABLE
    constexpr int    nr = MOE_ROUTER_ROWS, warps = MOE_ROUTER_WARPS, k = MOE_ROUTER_K, experts = MOE_ROUTER_EXPERTS, n = nr * nt;
    __shared__ float sums[warps][n];
    __shared__ bool  is_last;
    const int        tid = threadIdx.x, lane = tid % 32, warp = tid / 32;

    ggml_cuda_pdl_lc();
    if (!p.early) { ggml_cuda_pdl_sync(); }
    float4 a[nr][2];
#pragma unroll
    for (int r = 0; r < nr; ++r) {
        const int     row = blockIdx.x * nr + r;
        const float * w   = row < experts ? p.w + row * k : p.w_gate != nullptr ? p.w_gate : p.w;
#pragma unroll
        for (int i = 0; i < 2; ++i) { a[r][i] = ((const float4 *) w)[tid + i * 32 * warps]; }
    }
    if (p.early) { ggml_cuda_pdl_sync(); }
    float acc[n];
#pragma unroll
    for (int t = 0; t < nt; ++t) {
        const float4 * x  = (const float4 *) (p.x + min(t, p.n_tokens - 1) * k);
        const float4   b0 = x[tid], b1 = x[tid + 32 * warps];
#pragma unroll
        for (int r = 0; r < nr; ++r) {
            float s         = a[r][0].x * b0.x;
            s               = fmaf(a[r][0].y, b0.y, s);
            s               = fmaf(a[r][0].z, b0.z, s);
            s               = fmaf(a[r][0].w, b0.w, s);
            s               = fmaf(a[r][1].x, b1.x, s);
            s               = fmaf(a[r][1].y, b1.y, s);
            s               = fmaf(a[r][1].z, b1.z, s);
            acc[r * nt + t] = fmaf(a[r][1].w, b1.w, s);
        }
    }
    moe_router_sum<n>(acc, lane);
    if (lane < n) { sums[warp][lane] = acc[0]; }
    __syncthreads();
    if (warp == 0) {
        if (lane < n) {
            float s = 0.0f;
#pragma unroll
            for (int i = 0; i < warps; ++i) { s += sums[i][lane]; }
            const int row = blockIdx.x * nr + lane / nt, t = lane % nt;
            if (t < p.n_tokens) {
                if (row < experts) {
                    p.logits[t * experts + row] = s;
                } else if (row == experts && p.w_gate != nullptr) {
                    p.gate[t] = s;
                }
            }
        }
        __threadfence();
        __syncwarp();
        if (lane == 0) { is_last = atomicAdd(p.arrived, 1) == int(gridDim.x) - 1; }
    }
    __syncthreads();
    if (!is_last) { return; }
    if (tid == 0) { *p.arrived = 0; }
    __threadfence();

    // a warp has a token, a lane the experts lane, lane + 32, ...
    constexpr int per_lane = experts / 32;
    for (int token = warp; token < p.n_tokens; token += warps) {
        float v[per_lane];
        float max = -INFINITY;
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            v[i] = __ldcg(p.logits + token * experts + i * 32 + lane);
            max  = fmaxf(max, v[i]);
        }
        max         = warp_reduce_max(max);
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            v[i] = expf(v[i] - max);
            total += v[i];
        }
        total           = warp_reduce_sum(total);
        const float inv = 1.0f / total;
        uint32_t    left[per_lane]; // bits of what is not chosen yet: positive, so they are in the same order; NaN comes last
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            v[i] *= inv;
            left[i] = v[i] >= 0.0f ? __float_as_uint(v[i]) + 1 : 1;
        }
        float mine = 0.0f, chosen = 0.0f; // lane j has the weight of the j-th
        for (int j = 0; j < p.n_used; ++j) {
            uint32_t best = left[0];
            int      at   = 0;
#pragma unroll
            for (int i = 1; i < per_lane; ++i) {
                at   = left[i] > best ? i : at;
                best = left[i] > best ? left[i] : best;
            }
            const uint32_t most   = __reduce_max_sync(0xFFFFFFFF, best);
            const uint32_t expert = __reduce_min_sync(0xFFFFFFFF, best == most ? at * 32 + lane : experts); // the first of equals
            if (expert % 32 == uint32_t(lane)) {
#pragma unroll
                for (int i = 0; i < per_lane; ++i) { left[i] = uint32_t(i) == expert / 32 ? 0 : left[i]; }
            }
            const float weight = most > 1 ? __uint_as_float(most - 1) : 0.0f;
            chosen += weight;
            if (lane == j) {
                mine                       = weight;
                p.ids[token * experts + j] = expert;
            }
        }
        if (lane < p.n_used) { p.weights[token * p.n_used + lane] = mine / fmaxf(chosen, p.clamp) * p.scale; }
    }
#else
    GGML_UNUSED(p);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

bool ggml_cuda_can_fuse_moe_router(
        const ggml_tensor * logits, const ggml_tensor * gate, const ggml_tensor * ids, const ggml_tensor * weights, const int cc) {
    static const bool   apart      = getenv("GGML_CUDA_ROUTER_APART") != nullptr;
    const ggml_tensor * x          = logits->src[1];
    const auto          is_product = [&](const ggml_tensor * t, const int64_t rows) {
        const ggml_tensor * w = t->src[0];
        return w->type == GGML_TYPE_F32 && w->ne[0] == MOE_ROUTER_K && ggml_nelements(w) == rows * MOE_ROUTER_K && ggml_is_contiguous(w) &&
               (uintptr_t) w->data % 16 == 0 && t->type == GGML_TYPE_F32 && ggml_is_contiguous(t) && !ggml_is_batch_invariant(t) &&
               t->src[1]->data == x->data && ggml_are_same_shape(t->src[1], x);
    };
    return !apart && GGML_CUDA_CC_IS_NVIDIA(cc) && ampere_mma_available(cc) && is_product(logits, MOE_ROUTER_EXPERTS) &&
           (gate == nullptr || is_product(gate, 1)) && x->type == GGML_TYPE_F32 && ggml_is_contiguous(x) && (uintptr_t) x->data % 16 == 0 &&
           x->ne[1] <= MOE_ROUTER_TOKENS && x->ne[2] * x->ne[3] == 1 && weights->ne[1] <= 32 && weights->type == GGML_TYPE_F32 &&
           ggml_is_contiguous(weights) && ids->type == GGML_TYPE_I32 && ids->nb[1] == MOE_ROUTER_EXPERTS * sizeof(int);
}

void ggml_cuda_op_moe_router(ggml_backend_cuda_context & ctx, const ggml_tensor * logits, ggml_tensor * gate, ggml_tensor * ids,
        ggml_tensor * weights, const float clamp, const float scale) {
    int *& arrived = ctx.moe_router_arrived[ctx.curr_stream_no];
    if (arrived == nullptr) {
        CUDA_CHECK(cudaMalloc((void **) &arrived, sizeof(int)));
        CUDA_CHECK(cudaMemsetAsync(arrived, 0, sizeof(int), ctx.stream()));
    }
    const int                   n_tokens = logits->ne[1];
    ggml_cuda_pool_alloc<float> logits_d(ctx.pool(), n_tokens * MOE_ROUTER_EXPERTS);

    moe_router_params p{};
    p.w        = (const float *) logits->src[0]->data;
    p.w_gate   = gate ? (const float *) gate->src[0]->data : nullptr;
    p.x        = (const float *) logits->src[1]->data;
    p.logits   = logits_d.get();
    p.gate     = gate ? (float *) gate->data : nullptr;
    p.weights  = (float *) weights->data;
    p.ids      = (int *) ids->data;
    p.arrived  = arrived;
    p.n_tokens = n_tokens;
    p.n_used   = weights->ne[1];
    p.clamp    = clamp;
    p.scale    = scale;
    p.early    = ggml_backend_buffer_get_usage(logits->src[0]->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS &&
                 (gate == nullptr || ggml_backend_buffer_get_usage(gate->src[0]->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS);

    const int                            n_blocks = MOE_ROUTER_EXPERTS / MOE_ROUTER_ROWS + (gate ? 1 : 0);
    const ggml_cuda_kernel_launch_params params(dim3(n_blocks), dim3(32 * MOE_ROUTER_WARPS), 0, ctx.stream());
    if (n_tokens == 1) {
        ggml_cuda_kernel_launch(moe_router<1>, params, p);
    } else if (n_tokens == 2) {
        ggml_cuda_kernel_launch(moe_router<2>, params, p);
    } else if (n_tokens <= 4) {
        ggml_cuda_kernel_launch(moe_router<4>, params, p);
    } else if (n_tokens <= 8) {
        ggml_cuda_kernel_launch(moe_router<8>, params, p);
    } else {
        ggml_cuda_kernel_launch(moe_router<16>, params, p);
    }
}
