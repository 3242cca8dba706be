#include "gated_delta_net_fold.cuh"
#include "gated_delta_net_device.cuh"
#include "unary.cuh"

#define GDN_FOLD_CONV   4 // inputs of the convolution
#define GDN_FOLD_TOKENS 8 // at a time

struct ggml_cuda_gdn_fold_args {
    const float *   x;    // [channels, ..]: queries, keys and values before the convolution
    const float *   beta; // [H, ..]
    const float *   alpha;
    const int32_t * rows;        // of x, beta and alpha
    const int32_t * offsets;     // [n_seqs + 1] in rows
    const int32_t * ids;         // [n_seqs] states that are read, negative: zeros
    const int32_t * to;          // [n_seqs] states that are written
    const float *   conv;        // [GDN_FOLD_CONV, channels]
    float *         conv_states; // [GDN_FOLD_CONV - 1, channels, ..]
    void *          states;      // [GDN_HEAD_SIZE, GDN_HEAD_SIZE, H, ..]
    bool            f16;
    const float *   gate_bias; // [H]
    const float *   gate_scale;
    float           k_eps;
    float           k_factor;
    int             H;
    int             H_k;
    int             channels;
};

// A block has n_warps*2*n_cols columns of a head's state in registers, as in gated_delta_net_head_f32. The convolution of its keys and values
//     goes through shared memory. It reads the convolution's states, which gated_delta_net_fold_conv_f32 replaces.
template <int n_warps, int n_cols>
static __global__ void __launch_bounds__(WARP_SIZE * n_warps, 16 / n_warps) gated_delta_net_fold_f32(const ggml_cuda_gdn_fold_args args) {
    constexpr int S         = GDN_HEAD_SIZE;
    constexpr int n_threads = WARP_SIZE * n_warps;
    constexpr int cols      = n_warps * 2 * n_cols;
    constexpr int n_own     = (S + cols + n_threads - 1) / n_threads; // channels of a thread

    const int head     = blockIdx.x;
    const int sequence = blockIdx.y;
    const int block0   = blockIdx.z * cols;
    const int lane     = threadIdx.x % WARP_SIZE;
    const int row      = 4 * (lane % 16);                                  // and 64 behind
    const int col0     = threadIdx.x / WARP_SIZE * 2 * n_cols + lane / 16; // of the block, and every second one behind

    __shared__ __align__(16) float kv[GDN_FOLD_TOKENS][S + cols];

    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();

    const int first = args.offsets[sequence];
    const int n     = args.offsets[sequence + 1] - first;
    const int id    = args.ids[sequence];
    const int to    = args.to[sequence];
    if (n == 0 && id == to) { return; }

    int   channel[n_own];
    float w[n_own][GDN_FOLD_CONV];
    float v[n_own][GDN_FOLD_CONV];
#pragma unroll
    for (int c = 0; c < n_own; ++c) {
        const int i = threadIdx.x + c * n_threads;
        channel[c]  = i < S ? (args.H_k + head % args.H_k) * S + i : (2 * args.H_k + head) * S + block0 + i - S;
        if (i >= S + cols) { continue; }
#pragma unroll
        for (int j = 0; j < GDN_FOLD_CONV; ++j) { w[c][j] = args.conv[channel[c] * GDN_FOLD_CONV + j]; }
        const float * old = args.conv_states + ((int64_t) id * args.channels + channel[c]) * (GDN_FOLD_CONV - 1);
#pragma unroll
        for (int j = 0; j < GDN_FOLD_CONV - 1; ++j) { v[c][j] = id < 0 ? 0.0f : old[j]; }
    }

    const int64_t at = (int64_t) head * S * S + (block0 + col0) * S + row;
    float4        s[n_cols][2];
#pragma unroll
    for (int c = 0; c < n_cols; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            s[c][i] = id < 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) :
                               load_state(args.states, args.f16, (int64_t) id * args.H * S * S + at + c * 2 * S + i * S / 2);
        }
    }

    for (int t0 = 0; t0 < n; t0 += GDN_FOLD_TOKENS) {
        const int n_t = min(GDN_FOLD_TOKENS, n - t0);
        for (int t = 0; t < n_t; ++t) {
            const float * x = args.x + (int64_t) args.rows[first + t0 + t] * args.channels;
#pragma unroll
            for (int c = 0; c < n_own; ++c) {
                const int i = threadIdx.x + c * n_threads;
                if (i >= S + cols) { continue; }
                v[c][GDN_FOLD_CONV - 1] = x[channel[c]];

                float sumf = 0.0f;
#pragma unroll
                for (int j = 0; j < GDN_FOLD_CONV; ++j) { sumf += v[c][j] * w[c][j]; }
                kv[t][i] = ggml_cuda_op_silu_single(sumf);

#pragma unroll
                for (int j = 0; j < GDN_FOLD_CONV - 1; ++j) { v[c][j] = v[c][j + 1]; }
            }
        }
        __syncthreads();

        for (int t = 0; t < n_t; ++t) {
            const int64_t gates = (int64_t) args.rows[first + t0 + t] * args.H + head;
            const float   beta  = delta_net_beta(args.beta[gates]);
            const float   g     = expf(delta_net_gate(args.alpha[gates], args.gate_bias[head], args.gate_scale[head]));

            float4 k[2] = { *(const float4 *) (kv[t] + row), *(const float4 *) (kv[t] + row + S / 2) };
            rms_norm_scale_half(k, args.k_eps, args.k_factor);

            float delta[n_cols];
#pragma unroll
            for (int c = 0; c < n_cols; ++c) { delta[c] = kv[t][S + col0 + 2 * c]; }
            delta_net_token(s, delta, k, g, beta);
            if (args.f16) { round_states(s); }
        }
        __syncthreads();
    }

#pragma unroll
    for (int c = 0; c < n_cols; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) { store_state(args.states, args.f16, (int64_t) to * args.H * S * S + at + c * 2 * S + i * S / 2, s[c][i]); }
    }
}

// The last inputs of the convolution, a thread for each channel.
static __global__ void gated_delta_net_fold_conv_f32(const ggml_cuda_gdn_fold_args args) {
    const int sequence = blockIdx.y;
    const int channel  = blockIdx.x * blockDim.x + threadIdx.x;

    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();

    const int first = args.offsets[sequence];
    const int n     = args.offsets[sequence + 1] - first;
    const int id    = args.ids[sequence];
    const int to    = args.to[sequence];
    if (channel >= args.channels || (n == 0 && id == to)) { return; }

    const float * old = args.conv_states + ((int64_t) id * args.channels + channel) * (GDN_FOLD_CONV - 1);
    float         v[GDN_FOLD_CONV - 1];
#pragma unroll
    for (int j = 0; j < GDN_FOLD_CONV - 1; ++j) {
        const int i = n + j; // in the old ones with x behind them
        if (i < GDN_FOLD_CONV - 1) {
            v[j] = id < 0 ? 0.0f : old[i];
        } else {
            v[j] = args.x[(int64_t) args.rows[first + i - (GDN_FOLD_CONV - 1)] * args.channels + channel];
        }
    }
    float * written = args.conv_states + ((int64_t) to * args.channels + channel) * (GDN_FOLD_CONV - 1);
#pragma unroll
    for (int j = 0; j < GDN_FOLD_CONV - 1; ++j) { written[j] = v[j]; }
}

static const ggml_tensor * without_views(const ggml_tensor * tensor) {
    while (tensor->op == GGML_OP_VIEW || tensor->op == GGML_OP_RESHAPE) { tensor = tensor->src[0]; }
    return tensor;
}

static const ggml_tensor * other_source(const ggml_tensor * node, const ggml_tensor * known) {
    return node->src[0] == known ? node->src[1] : node->src[0];
}

bool ggml_cuda_can_gated_delta_net_fold(ggml_backend_cuda_context & ctx, const ggml_cuda_gdn_fold_nodes & nodes) {
    static const char * env     = getenv("GGML_CUDA_GDN_FOLD");
    static const bool   enabled = env == nullptr || atoi(env) != 0;

    const ggml_tensor * conv     = nodes.conv;
    const ggml_tensor * gdn      = nodes.gdn;
    const ggml_tensor * k        = nodes.k_norm->src[0];
    const ggml_tensor * q        = nodes.q_norm->src[0];
    const ggml_tensor * v        = gdn->src[2];
    const int64_t       channels = conv->src[1]->ne[0];
    const int64_t       H        = v->ne[1];
    const int64_t       H_k      = k->ne[1];

    const auto is_part = [&](const ggml_tensor * part, const int64_t first, const int64_t n_heads) { // of the convolution
        return part->op == GGML_OP_VIEW && part->view_src == conv && part->view_offs == first * GDN_HEAD_SIZE * sizeof(float) &&
               part->ne[0] == GDN_HEAD_SIZE && part->ne[1] == n_heads && part->nb[1] == GDN_HEAD_SIZE * sizeof(float) &&
               part->nb[2] == channels * sizeof(float);
    };
    const auto are_states = [&](const ggml_tensor * written, const ggml_tensor * packed, const ggml_tensor * all, const int64_t row) {
        return written->src[0]->view_src == packed && written->src[0]->op == GGML_OP_VIEW && written->data == all->data && written->ne[0] == row &&
               ggml_is_contiguous(written) && ggml_is_contiguous(all) && written->src[1]->type == GGML_TYPE_I32 &&
               written->src[1]->data == nodes.states->src[1]->data && ggml_is_contiguous(written->src[1]);
    };
    const auto is_kept = [&](const ggml_tensor * rows, const int64_t n) {
        return rows->src[0]->type == GGML_TYPE_F32 && rows->src[0]->ne[0] == n && ggml_is_contiguous(rows->src[0]) &&
               rows->src[1]->data == nodes.x->src[1]->data && rows->src[1]->type == GGML_TYPE_I32 && ggml_is_contiguous(rows->src[1]);
    };
    const ggml_tensor * gate_bias  = nodes.add->src[1];
    const ggml_tensor * gate_scale = other_source(nodes.gate, nodes.softplus);

    return enabled && GGML_CUDA_CC_IS_NVIDIA(ggml_cuda_info().devices[ctx.device].cc) && gdn->src[6] && gdn->src[7] && conv->src[4] &&
           conv->src[2]->ne[0] == GDN_FOLD_CONV && ggml_get_op_params_i32(conv, 0) == 1 && conv->src[1] == nodes.x && is_kept(nodes.x, channels) &&
           is_kept(nodes.beta, H) && is_kept(nodes.alpha, H) && channels == (2 * H_k + H) * GDN_HEAD_SIZE && H % H_k == 0 && is_part(q, 0, H_k) &&
           is_part(k, H_k, H_k) && is_part(v, 2 * H_k, H) && without_views(nodes.sigmoid->src[0]) == nodes.beta &&
           without_views(nodes.add->src[0]) == nodes.alpha && nodes.softplus->src[0] == nodes.add &&
           (nodes.gate->src[0] == nodes.softplus || nodes.gate->src[1] == nodes.softplus) && ggml_is_contiguous(gate_bias) &&
           ggml_is_contiguous(gate_scale) && gate_bias->type == GGML_TYPE_F32 && gate_scale->type == GGML_TYPE_F32 &&
           ggml_nelements(gate_bias) == H && ggml_nelements(gate_scale) == H && nodes.q_scale->src[0] == nodes.q_norm &&
           nodes.k_scale->src[0] == nodes.k_norm && ggml_get_op_params_f32(nodes.k_scale, 1) == 0.0f && gdn->src[0] == nodes.q_scale &&
           gdn->src[1] == nodes.k_scale && without_views(gdn->src[3]) == nodes.gate && without_views(gdn->src[4]) == nodes.sigmoid &&
           gdn->src[3]->ne[0] == 1 && gdn->src[6]->data == conv->src[3]->data && gdn->src[7]->data == conv->src[4]->data &&
           ggml_get_op_params_i32(gdn, 0) == 1 && are_states(nodes.conv_states, conv, conv->src[0], (GDN_FOLD_CONV - 1) * channels) &&
           nodes.conv_states->type == GGML_TYPE_F32 && are_states(nodes.states, gdn, gdn->src[5], GDN_HEAD_SIZE * GDN_HEAD_SIZE * H) &&
           nodes.states->type == gdn->src[5]->type && (nodes.states->type == GGML_TYPE_F32 || nodes.states->type == GGML_TYPE_F16) &&
           (uintptr_t) nodes.states->data % 16 == 0 && gdn->src[6]->ne[0] < 65536;
}

void ggml_cuda_op_gated_delta_net_fold(ggml_backend_cuda_context & ctx, const ggml_cuda_gdn_fold_nodes & nodes) {
    ggml_cuda_gdn_fold_args args;
    args.x           = (const float *) nodes.x->src[0]->data;
    args.beta        = (const float *) nodes.beta->src[0]->data;
    args.alpha       = (const float *) nodes.alpha->src[0]->data;
    args.rows        = (const int32_t *) nodes.x->src[1]->data;
    args.offsets     = (const int32_t *) nodes.gdn->src[7]->data;
    args.ids         = (const int32_t *) nodes.gdn->src[6]->data;
    args.to          = (const int32_t *) nodes.states->src[1]->data;
    args.conv        = (const float *) nodes.conv->src[2]->data;
    args.conv_states = (float *) nodes.conv_states->data;
    args.states      = nodes.states->data;
    args.f16         = nodes.states->type == GGML_TYPE_F16;
    args.gate_bias   = (const float *) nodes.add->src[1]->data;
    args.gate_scale  = (const float *) other_source(nodes.gate, nodes.softplus)->data;
    args.k_eps       = ggml_get_op_params_f32(nodes.k_norm, 0);
    args.k_factor    = ggml_get_op_params_f32(nodes.k_scale, 0);
    args.H           = nodes.gdn->src[2]->ne[1];
    args.H_k         = nodes.k_norm->src[0]->ne[1];
    args.channels    = nodes.conv->src[1]->ne[0];

    const unsigned n_seqs = nodes.gdn->src[6]->ne[0];
    const auto     launch = [&](auto kernel, const unsigned n_warps, const unsigned n_blocks) { // of a head
        const ggml_cuda_kernel_launch_params params(dim3(args.H, n_seqs, n_blocks), dim3(WARP_SIZE * n_warps), 0, ctx.stream());
        ggml_cuda_kernel_launch(kernel, params, args);
    };
    // few heads are spread over more multiprocessors
    if (args.H * n_seqs >= 4u * ggml_cuda_info().devices[ctx.device].nsm) {
        launch(gated_delta_net_fold_f32<8, 8>, 8, 1);
    } else {
        launch(gated_delta_net_fold_f32<2, 8>, 2, 4);
    }
    const ggml_cuda_kernel_launch_params params(dim3((args.channels + 255) / 256, n_seqs), dim3(256), 0, ctx.stream());
    ggml_cuda_kernel_launch(gated_delta_net_fold_conv_f32, params, args);
}
