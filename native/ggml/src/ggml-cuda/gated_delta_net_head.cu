#include "gated_delta_net_head.cuh"
#include "gated_delta_net_device.cuh"

// What Qwen3.5 has around it, as part of the kernel: norms of queries and keys, the gates before, the gated norm behind.
struct ggml_cuda_gdn_chain {
    const float *         gate_bias  = nullptr; // [H], beta = sigmoid(beta), g = softplus(g + gate_bias)*gate_scale
    const float *         gate_scale = nullptr; // [H]
    float                 qk_eps     = 0.0f;    // q = rms_norm(q)*qk_factor, and k
    float                 qk_factor  = 0.0f;
    const float *         norm_w     = nullptr; // [S_v], y = rms_norm(dst)*norm_w*silu(z)
    const float *         z          = nullptr; // [S_v, H, n_tokens, n_seqs], contiguous like y
    float *               y          = nullptr; // nullptr: its columns alone
    float                 norm_eps   = 0.0f;
    ggml_cuda_columns_out columns;
};

// Zeros for the tokens of no sequence, those from `first` on: n of the head's columns from col0 on.
template <bool chained, bool gated, int nthreads>
static __device__ void no_sequence(
        const ggml_cuda_gdn_args & args, const ggml_cuda_gdn_chain & chain, const int64_t first, const int head, const int col0, const int n) {
    for (int64_t i = threadIdx.x; i < (args.n_tokens - first) * n / 4; i += nthreads) {
        const int64_t at   = ((first + i / (n / 4)) * args.H + head) * GDN_HEAD_SIZE / 4 + col0 / 4 + i % (n / 4);
        const float4  zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if constexpr (gated) {
            if (chain.y != nullptr) { ((float4 *) chain.y)[at] = zero; }
            store_columns(chain.columns, at, zero);
        } else {
            ((float4 *) args.dst)[at] = zero;
        }
    }
    GGML_UNUSED_VARS(chain);
}

// Half a warp has a column of the state at a time (stored transposed: its 128 elements follow each other), and n_cols of them in registers:
//     each is read and written once, 16 bytes a thread. A block has n_warps*2*n_cols columns of a head. If these are all, it also computes
//     the gated norm. All sums have an order of their own, so that results do not depend on which blocks there are.
template <bool chained, int n_warps, int n_cols>
static __global__ void __launch_bounds__(WARP_SIZE * n_warps, 16 / n_warps) gated_delta_net_head_f32(const ggml_cuda_gdn_args args,
        const ggml_cuda_gdn_chain chain, void * state_rest, const int64_t state_slot_stride, const int K, const int t_first, const uint3 neqk1_magic,
        const uint3 rq3_magic, const float scale) {
    constexpr int  S     = GDN_HEAD_SIZE;
    constexpr bool gated = chained && n_warps * 2 * n_cols == S;

    const int head     = blockIdx.x;
    const int sequence = blockIdx.y;
    const int warp     = threadIdx.x / WARP_SIZE;
    const int lane     = threadIdx.x % WARP_SIZE;
    const int half     = lane / 16;
    const int row      = 4 * (lane % 16);                                   // and 64 behind
    const int col0     = (blockIdx.z * n_warps + warp) * 2 * n_cols + half; // and every second one behind

    const int H = args.H;

    __shared__ float out[gated ? 2 : 1][S];

    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();

    int64_t first    = 0; // token
    int     n_tokens = args.n_tokens;
    int     t_begin  = t_first;
    if (args.offsets) {
        first = args.offsets[sequence];
        if (sequence == args.n_seqs) {
            no_sequence<chained, gated, n_warps * WARP_SIZE>(args, chain, first, head, blockIdx.z * n_warps * 2 * n_cols, n_warps * 2 * n_cols);
            return;
        }
        n_tokens = args.offsets[sequence + 1] - first;
        t_begin  = ggml_cuda_gdn_n_chunked(n_tokens, args.n_last);
        if (t_begin == n_tokens && n_tokens > 0) { return; }
    }

    // the state may lie where the new one goes
    const int64_t state_to = args.ids_to ? args.ids_to[sequence] : sequence;
    float4        s[n_cols][2];
    {
        const bool    chunks_before = args.offsets && t_begin > 0;
        const int64_t state_id      = chunks_before ? state_to : args.ids ? args.ids[sequence] : sequence;
        if (n_tokens == 0 && state_id == state_to && args.state == args.curr_state) { return; } // the state stays where it is
        const void *  state = chunks_before ? args.state : args.curr_state;
        const bool    f16   = chunks_before ? args.types.to_f16 : args.types.from_f16;
        const int64_t at    = (state_id * H + head) * S * S + col0 * S + row;
#pragma unroll
        for (int c = 0; c < n_cols; ++c) {
            s[c][0] = state_id < 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : load_state(state, f16, at + c * 2 * S);
            s[c][1] = state_id < 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : load_state(state, f16, at + c * 2 * S + S / 2);
        }
    }
    const auto store_states = [&](void * state, const int64_t first, const int64_t to) {
        const int64_t at = first + (to * H + head) * S * S + col0 * S + row;
#pragma unroll
        for (int c = 0; c < n_cols; ++c) {
            store_state(state, args.types.to_f16, at + c * 2 * S, s[c][0]);
            store_state(state, args.types.to_f16, at + c * 2 * S + S / 2, s[c][1]);
        }
    };
    if (n_tokens == 0) { store_states(args.state, 0, state_to); }

    const int64_t qk_offset = fastdiv(sequence, rq3_magic) * args.sq3 + first * args.sq2 + fastmodulo(head, neqk1_magic) * args.sq1 + row;
    const int64_t v_offset  = sequence * args.sv3 + first * args.sv2 + head * args.sv1 + col0;
    const int64_t g_offset  = sequence * args.sb3 + first * args.sb2 + head * args.sb1;
    const int64_t y_first   = args.offsets ? first : (int64_t) sequence * n_tokens;

    for (int t = t_begin; t < n_tokens; ++t) {
        float4 k[2], q[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            k[i] = *(const float4 *) (args.k + qk_offset + t * args.sq2 + i * S / 2);
            q[i] = *(const float4 *) (args.q + qk_offset + t * args.sq2 + i * S / 2);
        }
        float beta = args.beta[g_offset + t * args.sb2];
        float g    = args.g[g_offset + t * args.sb2];
        if constexpr (chained) {
            beta = delta_net_beta(beta);
            g    = delta_net_gate(g, chain.gate_bias[head], chain.gate_scale[head]);
            rms_norm_scale_half(k, chain.qk_eps, chain.qk_factor);
            rms_norm_scale_half(q, chain.qk_eps, chain.qk_factor);
        }
        g = expf(g);

        float * out_t = gated ? out[t % 2] : args.dst + ((y_first + t) * H + head) * S;
        float   delta[n_cols];
#pragma unroll
        for (int c = 0; c < n_cols; ++c) { delta[c] = args.v[v_offset + t * args.sv2 + 2 * c]; }
        delta_net_token(s, delta, k, g, beta);
#pragma unroll
        for (int c = 0; c < n_cols; ++c) {
            const float sq = warp_reduce_sum<16>(dot(s[c][1], q[1], dot(s[c][0], q[0], 0.0f)));
            if (lane % 16 == 0) { out_t[col0 + 2 * c] = sq * scale; }
        }
        if (args.types.rounded) { round_states(s); }

        const int slot = n_tokens - 1 - t;
        if (slot == 0) {
            if (args.ids_to == nullptr || state_to != args.types.spare) { store_states(args.state, 0, state_to); }
        } else if (slot < K) {
            store_states(state_rest, (slot - 1) * state_slot_stride, sequence);
        }

        if constexpr (gated) {
            __syncthreads(); // the other half of out is free once all have read it, which they had at the barrier before
            if (warp == t % n_warps) {
                const int64_t i = (((y_first + t) * H + head) * S) / 4 + lane;
                const float4  w = ((const float4 *) chain.norm_w)[lane];
                const float4  z = ((const float4 *) chain.z)[i];
                float4        v = ((const float4 *) out[t % 2])[lane];
                v               = norm_gated(v, rsqrtf(warp_reduce_sum(sum_of_squares(v)) / S + chain.norm_eps), w, z);
                if (chain.y != nullptr) { ((float4 *) chain.y)[i] = v; }
                store_columns(chain.columns, i, v);
            }
        }
    }
}

static bool head_enabled() {
    static const char * env     = getenv("GGML_CUDA_GDN_HEAD");
    static const bool   enabled = env == nullptr || atoi(env) != 0;
    return enabled;
}

bool ggml_cuda_gdn_takes_f16(const ggml_tensor * gdn, const int cc) {
    return head_enabled() && GGML_CUDA_CC_IS_NVIDIA(cc) && gdn->op == GGML_OP_GATED_DELTA_NET && gdn->src[2]->ne[0] == GDN_HEAD_SIZE &&
           gdn->src[3]->ne[0] == 1;
}

bool ggml_cuda_gated_delta_net_head_supported(const ggml_cuda_gdn_args & args, const int64_t n_tokens, const int cc) {
    const auto vectors = [](const void * data, std::initializer_list<int64_t> strides) {
        bool ok = (uintptr_t) data % sizeof(float4) == 0;
        for (const int64_t stride : strides) { ok = ok && stride % 4 == 0; }
        return ok;
    };
    return head_enabled() && GGML_CUDA_CC_IS_NVIDIA(cc) && args.S_v == GDN_HEAD_SIZE && n_tokens < GGML_CUDA_GDN_CHUNKED_MIN_TOKENS &&
           args.H <= INT32_MAX && args.n_seqs < 65535 && vectors(args.q, { args.sq1, args.sq2, args.sq3 }) && vectors(args.k, {}) &&
           vectors(args.curr_state, {}) && vectors(args.state, {});
}

// Few heads are spread over more multiprocessors.
static bool whole_heads(const ggml_cuda_gdn_args & args) { return args.H * args.n_seqs >= 4 * ggml_cuda_info().devices[ggml_cuda_get_device()].nsm; }

template <bool chained, int n_warps, int n_cols>
static void launch_gated_delta_net_head(const ggml_cuda_gdn_args & args, const ggml_cuda_gdn_chain & chain, void * state_rest,
        const int64_t state_slot_stride, const int K, const int64_t t_first, cudaStream_t stream) {
    const dim3                           blocks(args.H, args.n_seqs + (args.offsets ? 1 : 0), GDN_HEAD_SIZE / (2 * n_warps * n_cols));
    const ggml_cuda_kernel_launch_params params(blocks, dim3(WARP_SIZE * n_warps), 0, stream);
    ggml_cuda_kernel_launch(gated_delta_net_head_f32<chained, n_warps, n_cols>, params, args, chain, state_rest, state_slot_stride, K, (int) t_first,
            init_fastdiv_values(args.neqk1), init_fastdiv_values(args.rq3), 1.0f / sqrtf((float) args.S_v));
}

template <bool chained>
static void gated_delta_net_head_cuda(const ggml_cuda_gdn_args & args, const ggml_cuda_gdn_chain & chain, void * state_rest,
        const int64_t state_slot_stride, const int K, const int64_t t_first, cudaStream_t stream) {
    if (whole_heads(args)) {
        launch_gated_delta_net_head<chained, 8, 8>(args, chain, state_rest, state_slot_stride, K, t_first, stream);
    } else {
        launch_gated_delta_net_head<chained, 2, 8>(args, chain, state_rest, state_slot_stride, K, t_first, stream);
    }
}

void ggml_cuda_gated_delta_net_head(const ggml_cuda_gdn_args & args, void * state_rest, const int64_t state_slot_stride, const int K,
        const int64_t t_first, cudaStream_t stream) {
    gated_delta_net_head_cuda<false>(args, {}, state_rest, state_slot_stride, K, t_first, stream);
}

static const ggml_tensor * other_source(const ggml_tensor * node, const ggml_tensor * known) {
    return node->src[0] == known ? node->src[1] : node->src[0];
}

static ggml_cuda_gdn_args chain_args(const ggml_cuda_gdn_chain_nodes & nodes, const ggml_cuda_gated_delta_net_fused_cache & cache) {
    const ggml_tensor * q      = nodes.q_norm->src[0];
    const ggml_tensor * k      = nodes.k_norm->src[0];
    const ggml_tensor * v      = nodes.gdn->src[2];
    const ggml_tensor * beta   = nodes.gdn->src[4];
    const ggml_tensor * ids    = nodes.gdn->src[6];
    const ggml_tensor * off    = nodes.gdn->src[7];
    const auto          stride = [&](const ggml_tensor * tensor, int dim) {
        return dim == 3 && off ? 0 : (int64_t) (tensor->nb[dim] / sizeof(float)); // with offsets all tokens are of one sequence
    };
    return { (const float *) q->data, (const float *) k->data, (const float *) v->data, (const float *) nodes.add->src[0]->data,
        (const float *) nodes.sigmoid->src[0]->data, nodes.gdn->src[5]->data, ids ? (const int32_t *) ids->data : nullptr, (float *) nodes.gdn->data,
        cache.data, cache.ids, v->ne[0], v->ne[1], v->ne[2], off ? ids->ne[0] : v->ne[3], stride(q, 1), stride(q, 2), stride(q, 3), stride(v, 1),
        stride(v, 2), stride(v, 3), stride(beta, 1), stride(beta, 2), stride(beta, 3), q->ne[1], v->ne[3] / q->ne[3],
        off ? (const int32_t *) off->data : nullptr, -1, ggml_cuda_gdn_state_types(nodes.gdn, cache.f16) };
}

bool ggml_cuda_can_gated_delta_net_chain(
        ggml_backend_cuda_context & ctx, const ggml_cuda_gdn_chain_nodes & nodes, const ggml_cuda_gated_delta_net_fused_cache & cache) {
    const ggml_tensor * gdn   = nodes.gdn;
    const ggml_tensor * v     = gdn->src[2];
    const ggml_tensor * x     = nodes.norm->src[0];
    const ggml_tensor * gated = nodes.gated;
    // what the kernel reads may have been free for results of operators that it computes, too
    const auto apart = [&](const ggml_tensor * read, const ggml_tensor * written) {
        return (const char *) read->data + ggml_nbytes(read) <= (const char *) written->data ||
               (const char *) written->data + ggml_nbytes(gated) <= (const char *) read->data;
    };
    for (const ggml_tensor * read :
            std::initializer_list<const ggml_tensor *>{ nodes.q_norm->src[0], nodes.k_norm->src[0], v, nodes.sigmoid->src[0], nodes.add->src[0] }) {
        if (!apart(read, gated) || !apart(read, gdn)) { return false; }
    }
    if (!apart(nodes.silu->src[0], gdn)) { return false; }
    return gdn->src[0] == nodes.q_scale && gdn->src[1] == nodes.k_scale && gdn->src[4] == nodes.sigmoid && gdn->src[3]->ne[0] == 1 &&
           (gdn->src[3] == nodes.gate || gdn->src[3]->src[0] == nodes.gate) && ggml_nelements(gdn->src[3]) == ggml_nelements(nodes.gate) &&
           ggml_are_same_shape(gdn->src[3], gdn->src[4]) && nodes.gate->ne[0] == v->ne[1] && x->view_src == gdn && x->view_offs == 0 &&
           ggml_is_contiguous(x) && ggml_are_same_shape(x, v) && v->type == GGML_TYPE_F32 && ggml_is_contiguous_rows(v) &&
           ggml_is_contiguous(gdn->src[5]) && ggml_cuda_can_delta_net_gates(nodes.sigmoid, nodes.add, nodes.softplus, nodes.gate) &&
           ggml_cuda_can_rms_norm_scale_pair(nodes.q_norm, nodes.q_scale, nodes.k_norm, nodes.k_scale) &&
           ggml_cuda_can_rms_norm_gated(nodes.norm, nodes.mul, nodes.silu, gated) &&
           ggml_cuda_gated_delta_net_head_supported(chain_args(nodes, cache), ggml_cuda_gdn_n_most(gdn), ggml_cuda_info().devices[ctx.device].cc);
}

void ggml_cuda_op_gated_delta_net_chain(ggml_backend_cuda_context & ctx, const ggml_cuda_gdn_chain_nodes & nodes,
        const ggml_cuda_gated_delta_net_fused_cache & cache, const ggml_cuda_columns_out & columns) {
    ggml_cuda_gdn_chain chain;
    chain.gate_bias               = (const float *) nodes.add->src[1]->data;
    chain.gate_scale              = (const float *) other_source(nodes.gate, nodes.softplus)->data;
    chain.qk_eps                  = ggml_get_op_params_f32(nodes.q_norm, 0);
    chain.qk_factor               = ggml_get_op_params_f32(nodes.q_scale, 0);
    chain.norm_w                  = (const float *) other_source(nodes.mul, nodes.norm)->data;
    chain.z                       = (const float *) nodes.silu->src[0]->data;
    chain.y                       = columns.only ? nullptr : (float *) nodes.gated->data;
    chain.norm_eps                = ggml_get_op_params_f32(nodes.norm, 0);
    chain.columns                 = columns;
    const ggml_cuda_gdn_args args = chain_args(nodes, cache);
    gated_delta_net_head_cuda<true>(args, chain, cache.rest, cache.slot_stride, ggml_get_op_params_i32(nodes.gdn, 0), 0, ctx.stream());
    if (!whole_heads(args)) { ggml_cuda_op_rms_norm_gated(ctx, nodes.norm, nodes.mul, nodes.silu, nodes.gated, columns); }
}
