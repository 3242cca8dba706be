#include "mmvq-experts.cuh"
#include "bulk-copy.cuh"
#include "cp-async.cuh"

// Gate, up and SiLU: a block has 32 rows of one pair of a token and an expert at a time, a warp two of gate and two of up. What comes out is
//     quantized as quantize_q8_1 does it, with scales in FP32.
// Down and the weighted sum: a block has 16 rows of one token at a time, a warp eight of them in one expert.
// A shared expert is one expert more for every token, with its gate's sigmoid as weight.
// Rows come through a ring in shared memory that each warp has for itself (cp.async.bulk). Down requests its first ones before gate and up
//     are done: gate and up let it start once they have waited for the ids themselves.

static constexpr int MMVQ_EXPERTS_WARPS     = 16;
static constexpr int MMVQ_EXPERTS_USED      = 8;    // two warps of down each
static constexpr int MMVQ_EXPERTS_UP        = 2048; // weights of a row of gate and up
static constexpr int MMVQ_EXPERTS_DOWN      = 512;  // and of down
static constexpr int MMVQ_EXPERTS_UP_ROWS   = 32;   // of a block
static constexpr int MMVQ_EXPERTS_DOWN_ROWS = 16;

struct mmvq_experts_params {
    const char *  gate;
    const char *  up;
    const char *  down;
    int64_t       sx_gate; // bytes between experts
    int64_t       sx_up;
    int64_t       sx_down;
    const float * x;  // columns
    int64_t       sx; // values between columns
    const int *   ids;
    int64_t       si;            // between tokens
    const float * weights;       // of the router, tokens x used
    const char *  shared_w_gate; // the shared expert's gate, up and down
    const char *  shared_w_up;
    const char *  shared_w_down;
    const float * shared_gate; // tokens, before the sigmoid
    int8_t *      h;           // pairs x 512, quantized; with a shared expert a token has one pair more
    float *       hd;          // their scales, of 32 values each
    float *       dst;
    int64_t       sd; // values between tokens
    int           n_tokens;
    int           n_rows; // of down
};

template <ggml_type type>
static constexpr int mmvq_experts_nbytes    = type == GGML_TYPE_Q4_K ? 144 : 210; // of 256 weights
static constexpr int MMVQ_EXPERTS_UP_STAGES = 4;

static constexpr int    MMVQ_EXPERTS_UP_ROW  = MMVQ_EXPERTS_UP / 256 * 144;
static constexpr size_t mmvq_experts_up_smem = (size_t) MMVQ_EXPERTS_WARPS * MMVQ_EXPERTS_UP_STAGES * 2 * MMVQ_EXPERTS_UP_ROW + 2 * MMVQ_EXPERTS_UP;
template <ggml_type type>
static constexpr int mmvq_experts_down_copy = 8 * (MMVQ_EXPERTS_DOWN / 256) * mmvq_experts_nbytes<type>;
template <ggml_type type, bool shared, ggml_type type_shared>
static constexpr int mmvq_experts_down_slot =
        shared && mmvq_experts_down_copy<type_shared> > mmvq_experts_down_copy<type> ? mmvq_experts_down_copy<type_shared> :
                                                                                       mmvq_experts_down_copy<type>;
template <ggml_type type, bool shared, ggml_type type_shared>
static constexpr int mmvq_experts_down_stages = mmvq_experts_down_slot<type, shared, type_shared> > mmvq_experts_down_copy<GGML_TYPE_Q4_K> ? 3 : 4;
template <ggml_type type, bool shared, ggml_type type_shared>
static constexpr size_t mmvq_experts_down_smem = (size_t) 2 * (MMVQ_EXPERTS_USED + shared) * mmvq_experts_down_stages<type, shared, type_shared> *
                                                 mmvq_experts_down_slot<type, shared, type_shared>;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
static __device__ __forceinline__ void mmvq_experts_prefetch(const void * src, const int nbytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(nbytes) : "memory");
}

// acc + d*scales*weights*column - minimums, of 32 weights: 16 of an even block of 32 (a) and 16 of the odd one behind it (b)
static __device__ __forceinline__ float mmvq_experts_q4_K(
        const char * x, const int part, const int (&ya)[4], const int (&yb)[4], const float da, const float db, const float sa, const float sb) {
    const uint4    head = *(const uint4 *) x;
    const uint4    q    = *(const uint4 *) (x + 16 + 16 * part);
    const int      j    = part / 2;
    const uint32_t sc0 = head.y & 0x3F3F3F3F, mn0 = head.z & 0x3F3F3F3F;
    const uint32_t sc1 = (head.w & 0x0F0F0F0F) | ((head.y >> 2) & 0x30303030);
    const uint32_t mn1 = ((head.w >> 4) & 0x0F0F0F0F) | ((head.z >> 2) & 0x30303030);
    const uint32_t sc  = (j < 2 ? sc0 : sc1) >> (j % 2 * 16);
    const uint32_t mn  = (j < 2 ? mn0 : mn1) >> (j % 2 * 16);
    const float2   dm  = __half22float2(*(const half2 *) &head.x);

    int            a = 0, b = 0;
    const uint32_t qs[4] = { q.x, q.y, q.z, q.w };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        a = ggml_cuda_dp4a(qs[i] & 0x0F0F0F0F, ya[i], a);
        b = ggml_cuda_dp4a((qs[i] >> 4) & 0x0F0F0F0F, yb[i], b);
    }
    const float dot = da * (float) ((int) (sc & 0xFF) * a) + db * (float) ((int) (sc >> 8 & 0xFF) * b);
    const float min = sa * (float) (mn & 0xFF) + sb * (float) (mn >> 8 & 0xFF);
    return dm.x * dot - dm.y * min;
}

// d*scales*(weights - 32)*column, of 32 weights: eight of each of four blocks of 32. odd: x is 2 bytes behind a multiple of 4. s: 32 times the sums of y.
static __device__ __forceinline__ float mmvq_experts_q6_K(
        const char * x, const int odd, const int part, const int (&y)[4][2], const float (&d)[4], const int (&s)[4]) {
    const int  h = part / 4, l = 8 * (part % 4);
    const auto load8 = [&](const int at) {
        const uint32_t * q = (const uint32_t *) (x + at - 2 * odd);
        const uint32_t   a = q[0], b = q[1], c = q[2];
        return make_uint2(__funnelshift_r(a, b, 16 * odd), __funnelshift_r(b, c, 16 * odd));
    };
    const uint2 lo = load8(64 * h + l), hi = load8(64 * h + 32 + l), top = load8(128 + 32 * h + l), sc = load8(192 + 8 * h);
    int         dot[4] = { -s[0], -s[1], -s[2], -s[3] };
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        const uint32_t a = m == 0 ? lo.x : lo.y, b = m == 0 ? hi.x : hi.y, c = m == 0 ? top.x : top.y;
        dot[0] = ggml_cuda_dp4a((a & 0x0F0F0F0F) | ((c << 4) & 0x30303030), y[0][m], dot[0]);
        dot[1] = ggml_cuda_dp4a((b & 0x0F0F0F0F) | ((c << 2) & 0x30303030), y[1][m], dot[1]);
        dot[2] = ggml_cuda_dp4a(((a >> 4) & 0x0F0F0F0F) | (c & 0x30303030), y[2][m], dot[2]);
        dot[3] = ggml_cuda_dp4a(((b >> 4) & 0x0F0F0F0F) | ((c >> 2) & 0x30303030), y[3][m], dot[3]);
    }
    const uint32_t s01 = sc.x >> (l / 16 * 8), s23 = sc.y >> (l / 16 * 8);
    const float v = d[0] * (float) ((int8_t) s01 * dot[0]) + d[1] * (float) ((int8_t) (s01 >> 16) * dot[1]) + d[2] * (float) ((int8_t) s23 * dot[2]) +
                    d[3] * (float) ((int8_t) (s23 >> 16) * dot[3]);
    return __half2float(*(const half *) (x + 208)) * v;
}
#endif // defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER

template <bool shared>
static __global__ void __launch_bounds__(32 * MMVQ_EXPERTS_WARPS, 1) mul_mat_vec_experts_up(
        const mmvq_experts_params p, const int down_copy, const int shared_copy) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
    constexpr int warps = MMVQ_EXPERTS_WARPS, stages = MMVQ_EXPERTS_UP_STAGES, k = MMVQ_EXPERTS_UP, row_bytes = MMVQ_EXPERTS_UP_ROW;
    constexpr int rows = MMVQ_EXPERTS_UP_ROWS, per_warp = rows / warps; // of gate, and as many of up
    constexpr int ring_bytes = stages * 2 * row_bytes;
    constexpr int used       = MMVQ_EXPERTS_USED + shared;
    static_assert(k == 128 * warps, "four values a thread");
    extern __shared__ uint4 smem_mmvq_experts[];
    __shared__ uint64_t     barriers[warps][stages];
    __shared__ float        yd[2][k / 32];
    __shared__ float        h[2][rows];
    const int               lane = threadIdx.x, warp = threadIdx.y, tid = 32 * warp + lane;
    char *                  ring = (char *) smem_mmvq_experts + warp * ring_bytes;
    int8_t *                yq   = (int8_t *) smem_mmvq_experts + warps * ring_bytes;
    const uint32_t          full = ggml_cuda_cvta_generic_to_shared(barriers[warp]);

    const int n_pairs = p.n_tokens * used;
    const int n_units = n_pairs * (MMVQ_EXPERTS_DOWN / rows);
    const int mine    = int(blockIdx.x) < n_units ? (n_units - 1 - blockIdx.x) / gridDim.x + 1 : 0; // units of this block, at most 32
    if (lane == 0) {
        for (int s = 0; s < stages; ++s) { bulk_barrier_init(full + 8 * s, 1); }
        bulk_barrier_init_fence();
    }
    __syncwarp();

    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc(); // down reads ids before it waits, so they have to be there

    // unit: pairs change fastest, so that tokens of the same expert read its rows at about the same time
    int expert = 0;
    if (lane < mine) {
        const int pair = (blockIdx.x + lane * gridDim.x) % n_pairs, i = pair % used;
        expert = i < MMVQ_EXPERTS_USED ? p.ids[pair / used * p.si + i] : -1;
    }
    const uint64_t policy = bulk_policy_evict_first();
    const auto     copy   = [&](const int i) { // row i%per_warp of unit i/per_warp
        const int n = i / per_warp;
        if (n >= mine) { return; }
        const int unit = blockIdx.x + n * gridDim.x;
        const int e    = __shfl_sync(0xFFFFFFFF, expert, n);
        const int row  = unit / n_pairs * rows + warp * per_warp + i % per_warp;
        if (lane == 0) {
            const uint32_t barrier = full + 8 * (i % stages);
            const uint32_t to      = ggml_cuda_cvta_generic_to_shared(ring + i % stages * 2 * row_bytes);
            bulk_barrier_expect(barrier, 2 * row_bytes);
            const char * gate = shared && e < 0 ? p.shared_w_gate : p.gate + e * p.sx_gate;
            const char * up   = shared && e < 0 ? p.shared_w_up : p.up + e * p.sx_up;
            bulk_copy(to, gate + row * row_bytes, row_bytes, barrier, policy);
            bulk_copy(to + row_bytes, up + row * row_bytes, row_bytes, barrier, policy);
        }
    };
    for (int i = 0; i < stages; ++i) { copy(i); }

    const auto quantize = [&](const int n) { // the column of unit n: as quantize_q8_1, with scales in FP32
        if (n >= mine) { return; }
        const int    token = (blockIdx.x + n * gridDim.x) % n_pairs / used;
        const float4 v     = ((const float4 *) (p.x + token * p.sx))[tid];
        float        amax  = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
        for (int o = 1; o < 8; o *= 2) { amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, o)); }
        const float d = amax / 127.0f, inv = amax > 0.0f ? 127.0f / amax : 0.0f;
        const int   q0 = __float2int_rn(v.x * inv), q1 = __float2int_rn(v.y * inv), q2 = __float2int_rn(v.z * inv), q3 = __float2int_rn(v.w * inv);
        ((int *) (yq + n % 2 * k))[tid] = (q0 & 0xFF) | (q1 & 0xFF) << 8 | (q2 & 0xFF) << 16 | q3 << 24;
        if (lane % 8 == 0) { yd[n % 2][tid / 8] = d; }
    };
    quantize(0);
    __syncthreads();

    const int part = lane % 8;
    for (int n = 0; n < mine; ++n) {
        int   ya[2][4], yb[2][4];
        float da[2], db[2], sa[2], sb[2];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const int  block = 4 * b + lane / 8;
            const int4 a4    = *(const int4 *) (yq + n % 2 * k + block * 256 + part / 2 * 64 + part % 2 * 16);
            const int4 b4    = *(const int4 *) (yq + n % 2 * k + block * 256 + part / 2 * 64 + part % 2 * 16 + 32);
            ya[b][0]         = a4.x;
            ya[b][1]         = a4.y;
            ya[b][2]         = a4.z;
            ya[b][3]         = a4.w;
            yb[b][0]         = b4.x;
            yb[b][1]         = b4.y;
            yb[b][2]         = b4.z;
            yb[b][3]         = b4.w;
            da[b]            = yd[n % 2][block * 8 + part / 2 * 2];
            db[b]            = yd[n % 2][block * 8 + part / 2 * 2 + 1];
            int s0 = 0, s1 = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s0 = ggml_cuda_dp4a(0x01010101, ya[b][i], s0);
                s1 = ggml_cuda_dp4a(0x01010101, yb[b][i], s1);
            }
            sa[b] = da[b] * s0;
            sb[b] = db[b] * s1;
        }
        quantize(n + 1);
#pragma unroll
        for (int r = 0; r < per_warp; ++r) {
            const int i = n * per_warp + r;
            bulk_barrier_wait(full + 8 * (i % stages), i / stages % 2);
            const char * x = ring + i % stages * 2 * row_bytes;
            float        g = 0.0f, u = 0.0f;
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                g += mmvq_experts_q4_K(x + (4 * b + lane / 8) * 144, part, ya[b], yb[b], da[b], db[b], sa[b], sb[b]);
                u += mmvq_experts_q4_K(x + row_bytes + (4 * b + lane / 8) * 144, part, ya[b], yb[b], da[b], db[b], sa[b], sb[b]);
            }
            // half of the lanes add up gate, the others up
            const bool low = lane < 16;
            float      v   = low ? g : u;
            v += __shfl_xor_sync(0xFFFFFFFF, low ? u : g, 16);
#pragma unroll
            for (int o = 8; o > 0; o /= 2) { v += __shfl_xor_sync(0xFFFFFFFF, v, o); }
            const float other = __shfl_xor_sync(0xFFFFFFFF, v, 16);
            if (lane == 0) { h[n % 2][warp * per_warp + r] = v / (1.0f + expf(-v)) * other; }
            copy(i + stages); // behind the sums: only then all lanes have read these rows
        }
        if (n + 1 == mine && lane == 0 &&
                int(blockIdx.x) < p.n_rows / MMVQ_EXPERTS_DOWN_ROWS * p.n_tokens) { // the first rows of down into the L2 cache
            const int token = blockIdx.x % p.n_tokens, piece = blockIdx.x / p.n_tokens * (MMVQ_EXPERTS_DOWN_ROWS / 8) + warp % 2;
            mmvq_experts_prefetch(p.down + p.ids[token * p.si + warp / 2] * p.sx_down + (int64_t) piece * down_copy, down_copy);
            if (shared && warp < 2) { mmvq_experts_prefetch(p.shared_w_down + (int64_t) piece * shared_copy, shared_copy); }
        }
        __syncthreads();
        if (warp == n % warps) {
            const int   unit = blockIdx.x + n * gridDim.x;
            const int   pair = unit % n_pairs;
            const float v    = h[n % 2][lane];
            float       amax = fabsf(v);
#pragma unroll
            for (int o = 1; o < 32; o *= 2) { amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, o)); }
            p.h[pair * MMVQ_EXPERTS_DOWN + unit / n_pairs * rows + lane] = __float2int_rn(amax > 0.0f ? v * (127.0f / amax) : 0.0f);
            if (lane == 0) { p.hd[pair * (MMVQ_EXPERTS_DOWN / 32) + unit / n_pairs] = amax / 127.0f; }
        }
    }
#else
    GGML_UNUSED_VARS(p, down_copy, shared_copy);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
// The products of a warp: eight rows of an expert in down, two at a time, acc[r] of the row 2*r + lane/16. h: the expert's column.
template <ggml_type type, typename wait_t>
static __device__ __forceinline__ void mmvq_experts_down_rows(
        float (&acc)[4], const char * rows, const int8_t * h, const float * hd, const int lane, const wait_t & wait) {
    constexpr int nbytes = mmvq_experts_nbytes<type>, row_bytes = MMVQ_EXPERTS_DOWN / 256 * nbytes;
    const int     block = lane % 16 / 8, part = lane % 8;
    h += block * 256;
    hd += block * 8;
    rows += lane / 16 * row_bytes + block * nbytes;
    if constexpr (type == GGML_TYPE_Q4_K) {
        const int4  a4    = *(const int4 *) (h + part / 2 * 64 + part % 2 * 16);
        const int4  b4    = *(const int4 *) (h + part / 2 * 64 + part % 2 * 16 + 32);
        const int   ya[4] = { a4.x, a4.y, a4.z, a4.w }, yb[4] = { b4.x, b4.y, b4.z, b4.w };
        const float da = hd[part / 2 * 2], db = hd[part / 2 * 2 + 1];
        int         s0 = 0, s1 = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s0 = ggml_cuda_dp4a(0x01010101, ya[i], s0);
            s1 = ggml_cuda_dp4a(0x01010101, yb[i], s1);
        }
        wait();
#pragma unroll
        for (int r = 0; r < 4; ++r) { acc[r] = mmvq_experts_q4_K(rows + 2 * r * row_bytes, part, ya, yb, da, db, da * s0, db * s1); }
    } else {
        int   y[4][2], s[4];
        float d[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int2 v = *(const int2 *) (h + 128 * (part / 4) + 32 * i + 8 * (part % 4));
            y[i][0]      = v.x;
            y[i][1]      = v.y;
            s[i]         = 32 * ggml_cuda_dp4a(0x01010101, v.x, ggml_cuda_dp4a(0x01010101, v.y, 0));
            d[i]         = hd[4 * (part / 4) + i];
        }
        wait();
#pragma unroll
        for (int r = 0; r < 4; ++r) { acc[r] = mmvq_experts_q6_K(rows + 2 * r * row_bytes, block, part, y, d, s); }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int o = 8; o > 0; o /= 2) { acc[r] += __shfl_xor_sync(0xFFFFFFFF, acc[r], o); }
    }
}
#endif // defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER

template <ggml_type type, bool shared, ggml_type type_shared>
static __global__ void __launch_bounds__(64 * (MMVQ_EXPERTS_USED + shared), 1) mul_mat_vec_experts_down(const mmvq_experts_params p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
    constexpr int           used = MMVQ_EXPERTS_USED + shared, warps = 2 * used, k = MMVQ_EXPERTS_DOWN, rows = MMVQ_EXPERTS_DOWN_ROWS;
    constexpr int           stages = mmvq_experts_down_stages<type, shared, type_shared>, slot = mmvq_experts_down_slot<type, shared, type_shared>;
    extern __shared__ uint4 smem_mmvq_experts[];
    __shared__ uint64_t     barriers[warps][stages];
    __shared__ float        sums[2][used][rows];
    const int               lane = threadIdx.x, warp = threadIdx.y, tid = 32 * warp + lane;
    char *                  ring      = (char *) smem_mmvq_experts + warp * stages * slot;
    const uint32_t          full      = ggml_cuda_cvta_generic_to_shared(barriers[warp]);
    const bool              is_shared = shared && warp / 2 == MMVQ_EXPERTS_USED;

    ggml_cuda_pdl_lc();
    const int n_units = p.n_rows / rows * p.n_tokens;
    const int mine    = int(blockIdx.x) < n_units ? (n_units - 1 - blockIdx.x) / gridDim.x + 1 : 0; // at most 32
    // The kernel before this one starts it when ids are there; other multiprocessors wrote them.
    int expert = 0;
    if (lane < mine && !is_shared) { expert = __ldcg(p.ids + (blockIdx.x + lane * gridDim.x) % p.n_tokens * p.si + warp / 2); }
    if (lane == 0) {
        for (int s = 0; s < stages; ++s) { bulk_barrier_init(full + 8 * s, 1); }
        bulk_barrier_init_fence();
    }
    __syncwarp();
    const uint64_t policy     = bulk_policy_evict_first();
    const int      copy_bytes = is_shared ? mmvq_experts_down_copy<type_shared> : mmvq_experts_down_copy<type>;
    const auto     copy       = [&](const int n) {
        if (n >= mine) { return; }
        const int unit = blockIdx.x + n * gridDim.x;
        const int e    = __shfl_sync(0xFFFFFFFF, expert, n);
        if (lane == 0) {
            const uint32_t barrier = full + 8 * (n % stages);
            const char *   from    = is_shared ? p.shared_w_down : p.down + e * p.sx_down;
            bulk_barrier_expect(barrier, copy_bytes);
            bulk_copy(ggml_cuda_cvta_generic_to_shared(ring + n % stages * slot),
                    from + (int64_t) (unit / p.n_tokens * (rows / 8) + warp % 2) * copy_bytes, copy_bytes, barrier, policy);
        }
    };
    for (int n = 0; n < stages; ++n) { copy(n); }
    ggml_cuda_pdl_sync();

    for (int n = 0; n < mine; ++n) {
        const int    unit  = blockIdx.x + n * gridDim.x;
        const int    token = unit % p.n_tokens;
        const int    pair  = token * used + warp / 2;
        const char * x     = ring + n % stages * slot;
        const auto   wait  = [&]() { bulk_barrier_wait(full + 8 * (n % stages), n / stages % 2); };
        float        acc[4];
        if (is_shared) {
            mmvq_experts_down_rows<type_shared>(acc, x, p.h + pair * k, p.hd + pair * (k / 32), lane, wait);
        } else {
            mmvq_experts_down_rows<type>(acc, x, p.h + pair * k, p.hd + pair * (k / 32), lane, wait);
        }
        if (lane % 16 == 0) {
#pragma unroll
            for (int r = 0; r < 4; ++r) { sums[n % 2][warp / 2][warp % 2 * 8 + 2 * r + lane / 16] = acc[r]; }
        }
        copy(n + stages); // behind the sums: only then all lanes have read these rows
        __syncthreads();
        if (tid < rows) {
            const float * w   = p.weights + token * MMVQ_EXPERTS_USED;
            float         sum = sums[n % 2][0][tid] * w[0];
#pragma unroll
            for (int e = 1; e < MMVQ_EXPERTS_USED; ++e) { sum += sums[n % 2][e][tid] * w[e]; }
            if constexpr (shared) { sum += sums[n % 2][MMVQ_EXPERTS_USED][tid] / (1.0f + expf(-p.shared_gate[token])); }
            p.dst[token * p.sd + unit / p.n_tokens * rows + tid] = sum;
        }
    }
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
}

static int mmvq_experts_max_tokens() {
    static const char * env_c = getenv("GGML_CUDA_MMVQ_EXPERTS_MAX");
    return env_c ? atoi(env_c) : 24;
}

// contiguous matrices of k columns, one an expert
static bool mmvq_experts_is_matrix(const ggml_tensor * w, const int64_t k) {
    return w->ne[0] == k && w->ne[3] == 1 && ggml_is_contiguous(w) && (uintptr_t) w->data % 16 == 0;
}

static bool mmvq_experts_can_compute(const ggml_tensor * gate, const ggml_tensor * up, const ggml_tensor * glu, const ggml_tensor * down) {
    return !ggml_is_batch_invariant(gate) && !ggml_is_batch_invariant(up) && !ggml_is_batch_invariant(down) && glu->src[0] == gate &&
           glu->src[1] == up && down->src[1] == glu && ggml_get_glu_op(glu) == GGML_GLU_OP_SWIGLU && gate->src[0]->type == GGML_TYPE_Q4_K &&
           up->src[0]->type == GGML_TYPE_Q4_K && (down->src[0]->type == GGML_TYPE_Q4_K || down->src[0]->type == GGML_TYPE_Q6_K) &&
           mmvq_experts_is_matrix(gate->src[0], MMVQ_EXPERTS_UP) && mmvq_experts_is_matrix(up->src[0], MMVQ_EXPERTS_UP) &&
           mmvq_experts_is_matrix(down->src[0], MMVQ_EXPERTS_DOWN) && gate->src[0]->ne[1] == MMVQ_EXPERTS_DOWN &&
           up->src[0]->ne[1] == MMVQ_EXPERTS_DOWN && down->src[0]->ne[1] % MMVQ_EXPERTS_DOWN_ROWS == 0;
}

bool ggml_cuda_can_fuse_mmvq_experts(const ggml_tensor * gate, const ggml_tensor * up, const ggml_tensor * glu, const ggml_tensor * down,
        const ggml_tensor * weights, const ggml_tensor * dst, const int cc) {
    if (cc != GGML_CUDA_CC_HOPPER || ggml_cuda_highest_compiled_arch(cc) < GGML_CUDA_CC_HOPPER) { return false; }
    const ggml_tensor * x        = up->src[1];
    const ggml_tensor * ids      = up->src[2];
    const int64_t       n_tokens = ids->ne[1];
    const int64_t max_units = WARP_SIZE * ggml_cuda_info().devices[ggml_cuda_get_device()].nsm; // a lane knows the expert of each unit of its block
    return n_tokens <= mmvq_experts_max_tokens() && mmvq_experts_can_compute(gate, up, glu, down) &&
           n_tokens * (MMVQ_EXPERTS_USED + 1) * (MMVQ_EXPERTS_DOWN / MMVQ_EXPERTS_UP_ROWS) <= max_units &&
           n_tokens * (down->ne[0] / MMVQ_EXPERTS_DOWN_ROWS) <= max_units && gate->src[1] == x && gate->src[2] == ids && down->src[2] == ids &&
           ids->ne[0] == MMVQ_EXPERTS_USED && ids->nb[0] == sizeof(int) && ids->ne[2] * ids->ne[3] == 1 && x->type == GGML_TYPE_F32 &&
           x->nb[0] == sizeof(float) && x->ne[1] == 1 && x->ne[3] == 1 && x->nb[2] % 16 == 0 && (uintptr_t) x->data % 16 == 0 &&
           weights->type == GGML_TYPE_F32 && ggml_is_contiguous(weights) && dst->type == GGML_TYPE_F32 && ggml_is_contiguous(dst);
}

bool ggml_cuda_can_fuse_mmvq_shared_expert(const ggml_cuda_shared_expert & shared, const ggml_tensor * x, const ggml_tensor * dst) {
    const int64_t n_tokens = x->ne[2];
    const auto    is_x     = [&](const ggml_tensor * t) {
        return t->data == x->data && t->type == GGML_TYPE_F32 && ggml_nrows(t) == n_tokens && ggml_is_contiguous(t) &&
               t->ne[0] * sizeof(float) == x->nb[2];
    };
    return mmvq_experts_can_compute(shared.gate, shared.up, shared.glu, shared.down) && ggml_is_matrix(shared.gate->src[0]) &&
           ggml_is_matrix(shared.up->src[0]) && ggml_is_matrix(shared.down->src[0]) && shared.down->ne[0] == dst->ne[0] &&
           is_x(shared.gate->src[1]) && is_x(shared.up->src[1]) && shared.weight->type == GGML_TYPE_F32 &&
           ggml_nelements(shared.weight) == n_tokens && ggml_is_contiguous(shared.weight);
}

template <ggml_type type, bool shared, ggml_type type_shared>
static void launch_mul_mat_vec_experts_down(const mmvq_experts_params & p, const int nsm, cudaStream_t stream) {
    constexpr size_t smem = mmvq_experts_down_smem<type, shared, type_shared>;
    CUDA_SET_SHARED_MEMORY_LIMIT((mul_mat_vec_experts_down<type, shared, type_shared>), smem);
    const int                            n_units = p.n_rows / MMVQ_EXPERTS_DOWN_ROWS * p.n_tokens;
    const ggml_cuda_kernel_launch_params params(dim3(std::min(nsm, n_units)), dim3(WARP_SIZE, 2 * (MMVQ_EXPERTS_USED + shared)), smem, stream);
    ggml_cuda_kernel_launch(mul_mat_vec_experts_down<type, shared, type_shared>, params, p);
}

template <bool shared>
static void launch_mul_mat_vec_experts_up(
        const mmvq_experts_params & p, const int down_copy, const int shared_copy, const int nsm, cudaStream_t stream) {
    CUDA_SET_SHARED_MEMORY_LIMIT(mul_mat_vec_experts_up<shared>, mmvq_experts_up_smem);
    const int                            n_units = p.n_tokens * (MMVQ_EXPERTS_USED + shared) * (MMVQ_EXPERTS_DOWN / MMVQ_EXPERTS_UP_ROWS);
    const ggml_cuda_kernel_launch_params params(dim3(std::min(nsm, n_units)), dim3(WARP_SIZE, MMVQ_EXPERTS_WARPS), mmvq_experts_up_smem, stream);
    ggml_cuda_kernel_launch(mul_mat_vec_experts_up<shared>, params, p, down_copy, shared_copy);
}

void ggml_cuda_mul_mat_vec_q_experts(ggml_backend_cuda_context & ctx, const ggml_tensor * gate, const ggml_tensor * up, const ggml_tensor * down,
        const ggml_tensor * weights, const ggml_cuda_shared_expert * shared, ggml_tensor * dst) {
    const ggml_tensor *          x       = up->src[1];
    const ggml_tensor *          ids     = up->src[2];
    const int                    n_pairs = ids->ne[1] * (MMVQ_EXPERTS_USED + (shared ? 1 : 0));
    ggml_cuda_pool_alloc<int8_t> h(ctx.pool(), n_pairs * MMVQ_EXPERTS_DOWN);
    ggml_cuda_pool_alloc<float>  hd(ctx.pool(), n_pairs * MMVQ_EXPERTS_DOWN / QK8_1);

    mmvq_experts_params p{};
    p.gate     = (const char *) gate->src[0]->data;
    p.up       = (const char *) up->src[0]->data;
    p.down     = (const char *) down->src[0]->data;
    p.sx_gate  = gate->src[0]->nb[2];
    p.sx_up    = up->src[0]->nb[2];
    p.sx_down  = down->src[0]->nb[2];
    p.x        = (const float *) x->data;
    p.sx       = x->nb[2] / sizeof(float);
    p.ids      = (const int *) ids->data;
    p.si       = ids->nb[1] / sizeof(int);
    p.weights  = (const float *) weights->data;
    p.h        = h.get();
    p.hd       = hd.get();
    p.dst      = (float *) dst->data;
    p.sd       = down->ne[0];
    p.n_tokens = ids->ne[1];
    p.n_rows   = down->ne[0];

    const int  nsm       = ggml_cuda_info().devices[ctx.device].nsm;
    const int  down_copy = 8 * down->src[0]->nb[1];
    const bool is_q6     = down->src[0]->type == GGML_TYPE_Q6_K;
    if (shared == nullptr) {
        launch_mul_mat_vec_experts_up<false>(p, down_copy, 0, nsm, ctx.stream());
        if (is_q6) {
            launch_mul_mat_vec_experts_down<GGML_TYPE_Q6_K, false, GGML_TYPE_Q6_K>(p, nsm, ctx.stream());
        } else {
            launch_mul_mat_vec_experts_down<GGML_TYPE_Q4_K, false, GGML_TYPE_Q4_K>(p, nsm, ctx.stream());
        }
        return;
    }
    p.shared_w_gate = (const char *) shared->gate->src[0]->data;
    p.shared_w_up   = (const char *) shared->up->src[0]->data;
    p.shared_w_down = (const char *) shared->down->src[0]->data;
    p.shared_gate   = (const float *) shared->weight->data;
    launch_mul_mat_vec_experts_up<true>(p, down_copy, 8 * shared->down->src[0]->nb[1], nsm, ctx.stream());
    if (shared->down->src[0]->type == GGML_TYPE_Q6_K) {
        if (is_q6) {
            launch_mul_mat_vec_experts_down<GGML_TYPE_Q6_K, true, GGML_TYPE_Q6_K>(p, nsm, ctx.stream());
        } else {
            launch_mul_mat_vec_experts_down<GGML_TYPE_Q4_K, true, GGML_TYPE_Q6_K>(p, nsm, ctx.stream());
        }
    } else if (is_q6) {
        launch_mul_mat_vec_experts_down<GGML_TYPE_Q6_K, true, GGML_TYPE_Q4_K>(p, nsm, ctx.stream());
    } else {
        launch_mul_mat_vec_experts_down<GGML_TYPE_Q4_K, true, GGML_TYPE_Q4_K>(p, nsm, ctx.stream());
    }
}
