#include "gated_delta_net_chunked.cuh"
#include "gated_delta_net_device.cuh"

// The gated delta rule over chunks of 64 tokens (WY form, see "Gated Delta Networks", https://arxiv.org/abs/2412.06464).
//
// With S the state [S_k, S_v] before a chunk, b the sums of the log decays g from the start of the chunk on, and
//     L[t][j] = beta[t] * exp(b[t] - b[j]) * (k[t], k[j]) for j < t
//     M[t][j] = scale   * exp(b[t] - b[j]) * (q[t], k[j]) for j <= t
//     T       = (I + L)^-1 * diag(beta)
// the values that the tokens of the chunk add to the state, their outputs and the next state are
//     D  = T * (V - diag(exp(b)) * K * S)
//     O  = diag(scale * exp(b)) * Q * S + M * D
//     S' = exp(b[63]) * S + (diag(exp(b[63] - b)) * K)^T * D
// T and M do not depend on the state, the first kernel makes them for all chunks in parallel. The second one goes through
// the chunks of a sequence, each block has 32 columns of the state of one head.
//
// The products run on tensor cores with TF32 operands that are split in two, x = hi + lo, with
// x*y = lo*hi + hi*lo + hi*hi: what is neglected is of the size of FP32 rounding errors.

#define GDN_C 64  // tokens of a chunk
#define GDN_D 128 // S_k == S_v
#define GDN_N 32  // columns of the state for a block

// strides in shared memory, free of bank conflicts:
#define GDN_LDK (GDN_D + 4) // 4 mod 32, for matrices on the left
#define GDN_LDT (GDN_C + 4)
#define GDN_LDS (GDN_N + 8) // 8 mod 32, for matrices on the right
#define GDN_LDP 36

struct gdn_frag_a { // 16x8, lane = 4*g + t holds (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)
    uint32_t hi[4];
    uint32_t lo[4];
};

struct gdn_frag_b { // 8x8, lane = 4*g + t holds (t, g), (t + 4, g)
    uint32_t hi[2];
    uint32_t lo[2];
};

// D += A*B for 16x8 values of FP32, lane = 4*g + t holds (g, 2*t), (g, 2*t + 1), (g + 8, 2*t), (g + 8, 2*t + 1)
static __device__ __forceinline__ void gdn_mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef AMPERE_MMA_AVAILABLE
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    GGML_UNUSED_VARS(d, a, b);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

// Copies 16 bytes to shared memory, zeros if not valid.
static __device__ __forceinline__ void gdn_cp_async_16(float * dst, const float * src, const bool valid) {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
            :
            : "r"((unsigned int) __cvta_generic_to_shared(dst)), "l"(src), "r"(valid ? 16 : 0)
            : "memory");
#else
    GGML_UNUSED_VARS(dst, src, valid);
    NO_DEVICE_CODE;
#endif // CP_ASYNC_AVAILABLE
}

static __device__ __forceinline__ void gdn_cp_async_commit() {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif // CP_ASYNC_AVAILABLE
}

// Waits until at most n of the committed groups are under way.
template <int n>
static __device__ __forceinline__ void gdn_cp_async_wait() {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.wait_group %0;" : : "n"(n) : "memory");
#endif // CP_ASYNC_AVAILABLE
}

// The tensor cores ignore the 13 low bits of their operands. Rounding hi leaves one bit less in lo.
static __device__ __forceinline__ void gdn_split(const float x, uint32_t & hi, uint32_t & lo) {
    hi = (__float_as_uint(x) + 0x1000) & 0xFFFFE000;
    lo = __float_as_uint(x - __uint_as_float(hi));
}

static __device__ __forceinline__ void gdn_mma(float (&d)[4], const gdn_frag_a & a, const gdn_frag_b & b) {
    gdn_mma_tf32(d, a.lo, b.hi);
    gdn_mma_tf32(d, a.hi, b.lo);
    gdn_mma_tf32(d, a.hi, b.hi);
}

// element (i, j) of the 16x8 matrix is x[i*si + j*sj]
static __device__ __forceinline__ gdn_frag_a gdn_load_a(const float * x, const int si, const int sj, const int g, const int t) {
    gdn_frag_a ret;
#pragma unroll
    for (int l = 0; l < 4; ++l) { gdn_split(x[(g + (l % 2) * 8) * si + (t + (l / 2) * 4) * sj], ret.hi[l], ret.lo[l]); }
    return ret;
}

// same, column j multiplied with f[j]
static __device__ __forceinline__ gdn_frag_a gdn_load_a(const float * x, const int si, const int sj, const int g, const int t, const float * f) {
    gdn_frag_a ret;
#pragma unroll
    for (int l = 0; l < 4; ++l) {
        const int j = t + (l / 2) * 4;
        gdn_split(x[(g + (l % 2) * 8) * si + j * sj] * f[j], ret.hi[l], ret.lo[l]);
    }
    return ret;
}

// element (i, j) of the 8x8 matrix is x[i*si + j*sj]
static __device__ __forceinline__ gdn_frag_b gdn_load_b(const float * x, const int si, const int sj, const int g, const int t) {
    gdn_frag_b ret;
#pragma unroll
    for (int l = 0; l < 2; ++l) { gdn_split(x[(t + l * 4) * si + g * sj], ret.hi[l], ret.lo[l]); }
    return ret;
}

// Loads rows of ncols values, those from nrows_valid on are zero.
template <int nrows, int ncols, int ld, int nthreads>
static __device__ __forceinline__ void gdn_load_rows(float * dst, const float * src, const int64_t stride, const int nrows_valid, const int tid) {
    constexpr int per_row = ncols / 4;
    static_assert(nrows * per_row % nthreads == 0, "bad number of threads");
#pragma unroll
    for (int i0 = 0; i0 < nrows * per_row; i0 += nthreads) {
        const int  i     = i0 + tid;
        const int  row   = i / per_row;
        const int  col   = (i % per_row) * 4;
        const bool valid = row < nrows_valid;
        gdn_cp_async_16(dst + row * ld + col, src + (valid ? row * stride : 0) + col, valid);
    }
}

// Where the tokens and chunks of a sequence are. With offsets a sequence has room for one chunk more than it may need, so that the place of its
// chunks follows from its own offset.
struct gdn_sequence {
    int64_t first;     // token, in tensors of all tokens of one sequence
    int64_t dst_first; // token of the output
    int     n_tokens;  // that are read as chunks
    int     first_chunk;
};

static __device__ __forceinline__ int gdn_first_chunk(const int32_t * offsets, const int sequence) { return offsets[sequence] / GDN_C + sequence; }

static __device__ __forceinline__ gdn_sequence gdn_find_sequence(
        const int32_t * offsets, const int sequence, const int n_tokens, const int n_last, const int64_t n_tokens_dst) {
    if (offsets == nullptr) { return { 0, sequence * n_tokens_dst, n_tokens, sequence * ((n_tokens + GDN_C - 1) / GDN_C) }; }
    const int first = offsets[sequence];
    return { first, first, ggml_cuda_gdn_n_chunked(offsets[sequence + 1] - first, n_last), gdn_first_chunk(offsets, sequence) };
}

// The sequence that a chunk is of, for all threads of a block.
template <int nthreads>
static __device__ __forceinline__ int gdn_sequence_of_chunk(
        const int32_t * offsets, const int n_seqs, const int n_tokens, const int chunk, const int tid) {
    if (offsets == nullptr) { return chunk / ((n_tokens + GDN_C - 1) / GDN_C); }
    int n = 0;
    for (int s = 0; s < n_seqs; s += nthreads) { n += __syncthreads_count(s + tid < n_seqs && gdn_first_chunk(offsets, s + tid) <= chunk); }
    return n - 1;
}

// X -> -T22 * L21 * T11 in the lower left of the inverse, for pairs of inverted blocks of n rows on the diagonal
template <int n, int nthreads>
static __device__ __forceinline__ void gdn_invert_merge(float * T, const float * L, float * P, const int tid) {
    constexpr int npairs = GDN_C / (2 * n);
#pragma unroll
    for (int i0 = 0; i0 < npairs * n * n; i0 += nthreads) {
        const int i    = i0 + tid;
        const int base = i / (n * n) * 2 * n;
        const int row  = i % (n * n) / n;
        const int col  = i % n;
        float     sum  = 0.0f;
#pragma unroll
        for (int m = 0; m < n; ++m) { sum += L[(base + n + row) * GDN_LDT + base + m] * T[(base + m) * GDN_LDT + base + col]; }
        P[(i / n) * GDN_LDP + col] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i0 = 0; i0 < npairs * n * n; i0 += nthreads) {
        const int i    = i0 + tid;
        const int pair = i / (n * n);
        const int base = pair * 2 * n;
        const int row  = i % (n * n) / n;
        const int col  = i % n;
        float     sum  = 0.0f;
#pragma unroll
        for (int m = 0; m < n; ++m) { sum += T[(base + n + row) * GDN_LDT + base + n + m] * P[(pair * n + m) * GDN_LDP + col]; }
        T[(base + n + row) * GDN_LDT + base + col] = -sum;
    }
    __syncthreads();
}

// T, M [64, 64] and exp(b), exp(b[63] - b) [2*64] of each chunk, head and sequence; a block has the heads of one of q and k.
// The chunk of a block, and its sequence.
struct gdn_chunk {
    int          sequence;
    gdn_sequence seq;
    int          chunk;
    int          t0;
    int          valid; // tokens, 0 or less: none
};

// The pointers are moved to the sequence's first token.
template <int nthreads>
static __device__ __forceinline__ gdn_chunk gdn_find_chunk(const int32_t * offsets, const int n_seqs, const int n_tokens, const int n_last,
        const int64_t sq2, const int64_t sb2, const float *& q, const float *& k, const float *& g, const float *& beta) {
    gdn_chunk res;
    res.sequence = gdn_sequence_of_chunk<nthreads>(offsets, n_seqs, n_tokens, blockIdx.x, threadIdx.x);
    res.seq      = gdn_find_sequence(offsets, res.sequence, n_tokens, n_last, 0);
    res.chunk    = (int) blockIdx.x - res.seq.first_chunk;
    res.t0       = res.chunk * GDN_C;
    res.valid    = min(GDN_C, res.seq.n_tokens - res.t0);
    q += res.seq.first * sq2;
    k += res.seq.first * sq2;
    g += res.seq.first * sb2;
    beta += res.seq.first * sb2;
    return res;
}

static __global__ void __launch_bounds__(128, 1) gated_delta_net_prepare(const float * q, const float * k, const float * g, const float * beta,
        float * T_d, float * M_d, float * E_d, const int32_t * offsets, const int n_seqs, const int n_last, const int H, const int neqk1,
        const int rq3, const int n_tokens, const int64_t sq1, const int64_t sq2, const int64_t sq3, const int64_t sb1, const int64_t sb2,
        const int64_t sb3, const float scale) {
    constexpr int nthreads = 128;

    const int tid                                = threadIdx.x;
    const int head_k                             = blockIdx.y;
    const auto [sequence, seq, chunk, t0, valid] = gdn_find_chunk<nthreads>(offsets, n_seqs, n_tokens, n_last, sq2, sb2, q, k, g, beta);

    const int warp = tid / 32;
    const int lg   = tid % 32 / 4;
    const int lt   = tid % 4;

    if (valid <= 0) { return; }

    extern __shared__ __align__(16) float gdn_smem[];
    float *                               sK = gdn_smem;
    float *                               sQ = sK + GDN_C * GDN_LDK;
    float *                               sE = sQ + GDN_C * GDN_LDK; // g, beta, sums of g and their rounding errors
    // the inverse is made where k and q were
    float * sL = sK;
    float * sT = sQ;
    float * sP = sL + GDN_C * GDN_LDT;

    const int64_t offset_qk = sequence / rq3 * sq3 + t0 * sq2 + head_k * sq1;
    gdn_load_rows<GDN_C, GDN_D, GDN_LDK, nthreads>(sK, k + offset_qk, sq2, valid, tid);
    gdn_load_rows<GDN_C, GDN_D, GDN_LDK, nthreads>(sQ, q + offset_qk, sq2, valid, tid);
    gdn_cp_async_commit();
    gdn_cp_async_wait<0>();
    __syncthreads();

    // 16 rows of K*K^T and Q*K^T up to the diagonal
    float kk[8][4] = { { 0.0f } };
    float qk[8][4] = { { 0.0f } };
#pragma unroll 2
    for (int i = 0; i < GDN_D; i += 8) {
        const gdn_frag_a ak = gdn_load_a(sK + warp * 16 * GDN_LDK + i, GDN_LDK, 1, lg, lt);
        const gdn_frag_a aq = gdn_load_a(sQ + warp * 16 * GDN_LDK + i, GDN_LDK, 1, lg, lt);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            if (n < 2 * (warp + 1)) {
                const gdn_frag_b b = gdn_load_b(sK + n * 8 * GDN_LDK + i, 1, GDN_LDK, lg, lt);
                gdn_mma(kk[n], ak, b);
                gdn_mma(qk[n], aq, b);
            }
        }
    }

    for (int head = head_k; head < H; head += neqk1) {
        const int64_t out = (int64_t) blockIdx.x * H + head;

        __syncthreads(); // q, k or the inverse of the previous head
        if (tid < GDN_C) {
            const int64_t offset = sequence * sb3 + (t0 + tid) * sb2 + head * sb1;
            sE[tid]              = tid < valid ? g[offset] : 0.0f;
            sE[GDN_C + tid]      = tid < valid ? beta[offset] : 0.0f;
        }
        __syncthreads();
        if (tid < GDN_C) {
            // exp() of differences of the sums must be as good as that of single values: keep the rounding errors
            float sum = 0.0f;
            float err = 0.0f;
            for (int i = 0; i <= tid; ++i) {
                const float x = sE[i];
                const float s = sum + x;
                const float y = s - sum;
                err += (sum - (s - y)) + (x - y);
                sum = s;
            }
            sE[2 * GDN_C + tid] = sum;
            sE[3 * GDN_C + tid] = err;
        }
        __syncthreads();
        const float * sBeta = sE + 1 * GDN_C;
        const float * sSum  = sE + 2 * GDN_C;
        const float * sErr  = sE + 3 * GDN_C;
        if (tid < GDN_C) {
            const float b                      = sSum[tid] + sErr[tid];
            const float db                     = (sSum[GDN_C - 1] - sSum[tid]) + (sErr[GDN_C - 1] - sErr[tid]);
            E_d[out * 2 * GDN_C + tid]         = expf(b);
            E_d[out * 2 * GDN_C + GDN_C + tid] = expf(db);
        }

#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
            for (int l = 0; l < 4; l += 2) {
                const int row = warp * 16 + lg + (l / 2) * 8;
                const int col = n * 8 + lt * 2;
                float2    L;
                float2    M;
                {
                    const float decay = expf((sSum[row] - sSum[col]) + (sErr[row] - sErr[col]));
                    L.x               = col < row ? sBeta[row] * decay * kk[n][l] : 0.0f;
                    M.x               = col <= row ? scale * decay * qk[n][l] : 0.0f;
                }
                {
                    const float decay = expf((sSum[row] - sSum[col + 1]) + (sErr[row] - sErr[col + 1]));
                    L.y               = col + 1 < row ? sBeta[row] * decay * kk[n][l + 1] : 0.0f;
                    M.y               = col + 1 <= row ? scale * decay * qk[n][l + 1] : 0.0f;
                }
                *(float2 *) (sL + row * GDN_LDT + col)                      = L;
                *(float2 *) (M_d + out * GDN_C * GDN_C + row * GDN_C + col) = M;
            }
        }
        for (int i = tid; i < GDN_C * GDN_LDT; i += nthreads) { sT[i] = 0.0f; }
        __syncthreads();

        // (I + L)^-1: blocks of 16 by forward substitution, a thread for each column
        if (tid < GDN_C) {
            const int base = tid / 16 * 16;
            const int col  = tid % 16;
            float     x[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                x[i] = i == col ? 1.0f : 0.0f;
#pragma unroll
                for (int m = 0; m < i; ++m) { x[i] -= sL[(base + i) * GDN_LDT + base + m] * x[m]; }
                sT[(base + i) * GDN_LDT + base + col] = x[i];
            }
        }
        __syncthreads();
        gdn_invert_merge<16, nthreads>(sT, sL, sP, tid);
        gdn_invert_merge<32, nthreads>(sT, sL, sP, tid);

        for (int i = tid; i < GDN_C * GDN_C; i += nthreads) {
            const int row                = i / GDN_C;
            const int col                = i % GDN_C;
            T_d[out * GDN_C * GDN_C + i] = sT[row * GDN_LDT + col] * sBeta[col];
        }
    }
}

// prefetch: k, q of the next chunk and T, M of this one are loaded while the tensor cores work, for GPUs with enough
//     shared memory. Otherwise T and M replace q.
template <bool prefetch>
static __global__ void __launch_bounds__(256, 1) gated_delta_net_chunks(const float * q, const float * k, const float * v, const float * T_d,
        const float * M_d, const float * E_d, const void * curr_state, const int32_t * ids, float * dst, void * state,
        const ggml_cuda_gdn_types types, const int32_t * ids_to, const int32_t * offsets, const int n_last, const int H, const int neqk1,
        const int rq3, const int n_tokens_each, const int n_tokens_dst, const int64_t sq1, const int64_t sq2, const int64_t sq3, const int64_t sv1,
        const int64_t sv2, const int64_t sv3, const float scale) {
    constexpr int nthreads = 256;

    const int head     = blockIdx.x;
    const int sequence = blockIdx.y;
    const int col0     = blockIdx.z * GDN_N;
    const int tid      = threadIdx.x;
    const int warp     = tid / 32;
    const int lg       = tid % 32 / 4;
    const int lt       = tid % 4;

    const gdn_sequence seq = gdn_find_sequence(offsets, sequence, n_tokens_each, n_last, n_tokens_dst);

    const int n_tokens = seq.n_tokens;
    const int n_chunks = (n_tokens + GDN_C - 1) / GDN_C;

    if (n_tokens == 0) { return; }

    // tokens are split among 4 warps, columns among 2
    const int row_w = warp % 4 * 16;
    const int col_w = warp / 4 * 16;

    constexpr int     size_k  = GDN_C * GDN_LDK;
    constexpr int     size_t_ = GDN_C * GDN_LDT;
    extern __shared__ __align__(16) float gdn_smem[];
    float *                               sK = gdn_smem; // k of this chunk, and of the next one
    float *                               sQ = sK + (prefetch ? 2 : 1) * size_k;
    float *                               sT = prefetch ? sQ + size_k : sQ;
    float *                               sM = sT + size_t_;
    float *                               sS = sM + size_t_;         // state
    float *                               sX = sS + GDN_D * GDN_LDS; // V - diag(exp(b))*K*S, then D
    float *                               sE = sX + GDN_C * GDN_LDS; // exp(b) and exp(b[63] - b), of the next chunk, too

    q += sequence / rq3 * sq3 + seq.first * sq2 + head % neqk1 * sq1;
    k += sequence / rq3 * sq3 + seq.first * sq2 + head % neqk1 * sq1;
    v += sequence * sv3 + seq.first * sv2 + head * sv1 + col0;
    dst += (seq.dst_first * H + head) * GDN_D + col0;

    const int64_t state_to = ids_to ? ids_to[sequence] : sequence;
    const int64_t state_id = ids ? ids[sequence] : sequence;
    const int64_t to       = (state_to * H + head) * GDN_D * GDN_D + col0 * GDN_D;
    const int64_t from     = (state_id * H + head) * GDN_D * GDN_D + col0 * GDN_D;

    const auto load_k = [&](const int chunk) {
        if (chunk < n_chunks) {
            gdn_load_rows<GDN_C, GDN_D, GDN_LDK, nthreads>(
                    sK + (prefetch ? chunk % 2 : 0) * size_k, k + (int64_t) chunk * GDN_C * sq2, sq2, n_tokens - chunk * GDN_C, tid);
        }
        gdn_cp_async_commit();
    };
    const auto load_q = [&](const int chunk) {
        if (chunk < n_chunks) {
            gdn_load_rows<GDN_C, GDN_D, GDN_LDK, nthreads>(sQ, q + (int64_t) chunk * GDN_C * sq2, sq2, n_tokens - chunk * GDN_C, tid);
            if (tid < 2 * GDN_C / 4) {
                const int64_t index = (int64_t) (seq.first_chunk + chunk) * H + head;
                gdn_cp_async_16(sE + chunk % 2 * 2 * GDN_C + tid * 4, E_d + index * 2 * GDN_C + tid * 4, true);
            }
        }
        gdn_cp_async_commit();
    };
    const auto load_tm = [&](const int chunk) {
        const int64_t index = (int64_t) (seq.first_chunk + chunk) * H + head;
        gdn_load_rows<GDN_C, GDN_C, GDN_LDT, nthreads>(sT, T_d + index * GDN_C * GDN_C, GDN_C, GDN_C, tid);
        gdn_load_rows<GDN_C, GDN_C, GDN_LDT, nthreads>(sM, M_d + index * GDN_C * GDN_C, GDN_C, GDN_C, tid);
        gdn_cp_async_commit();
    };

    load_k(0);
    load_q(0);

    // The state is stored transposed, a column is contiguous. Each warp keeps 16 rows of it.
    // note: the state may lie where the new one goes: a block reads its columns here, before it writes them below
    float S[GDN_N / 8][4];
#pragma unroll
    for (int n = 0; n < GDN_N / 8; ++n) {
#pragma unroll
        for (int l = 0; l < 4; ++l) {
            const int row           = warp * 16 + lg + (l / 2) * 8;
            const int col           = n * 8 + lt * 2 + l % 2;
            S[n][l]                 = state_id < 0 ? 0.0f : load_state_one(curr_state, types.from_f16, from + col * GDN_D + row);
            sS[row * GDN_LDS + col] = S[n][l];
        }
    }

    for (int chunk = 0; chunk < n_chunks; ++chunk) {
        const int t0    = chunk * GDN_C;
        const int valid = min(GDN_C, n_tokens - t0);

        const float * cK = sK + (prefetch ? chunk % 2 : 0) * size_k;
        const float * cE = sE + chunk % 2 * 2 * GDN_C;

        // the groups under way are k and q of this chunk
        if constexpr (prefetch) {
            load_tm(chunk);
            load_k(chunk + 1); // replaces k of the previous chunk, which has been read
            gdn_cp_async_wait<2>();
        } else {
            gdn_cp_async_wait<0>();
        }

        float2 vals[2][2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int l = 0; l < 2; ++l) {
                const int row = row_w + lg + l * 8;
                const int col = col_w + n * 8 + lt * 2;
                vals[n][l]    = row < valid ? *(const float2 *) (v + (t0 + row) * sv2 + col) : make_float2(0.0f, 0.0f);
            }
        }
        __syncthreads();

        float ks[2][4] = { { 0.0f } };
        float os[2][4] = { { 0.0f } };
#pragma unroll 4
        for (int i = 0; i < GDN_D; i += 8) {
            const gdn_frag_a ak = gdn_load_a(cK + row_w * GDN_LDK + i, GDN_LDK, 1, lg, lt);
            const gdn_frag_a aq = gdn_load_a(sQ + row_w * GDN_LDK + i, GDN_LDK, 1, lg, lt);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const gdn_frag_b b = gdn_load_b(sS + i * GDN_LDS + col_w + n * 8, GDN_LDS, 1, lg, lt);
                gdn_mma(ks[n], ak, b);
                gdn_mma(os[n], aq, b);
            }
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int l = 0; l < 2; ++l) {
                const int   row             = row_w + lg + l * 8;
                const int   col             = col_w + n * 8 + lt * 2;
                const float decay           = cE[row];
                sX[row * GDN_LDS + col + 0] = vals[n][l].x - decay * ks[n][2 * l + 0];
                sX[row * GDN_LDS + col + 1] = vals[n][l].y - decay * ks[n][2 * l + 1];
                os[n][2 * l + 0] *= scale * decay;
                os[n][2 * l + 1] *= scale * decay;
            }
        }
        __syncthreads();

        if constexpr (prefetch) {
            load_q(chunk + 1);
            gdn_cp_async_wait<2>();
        } else {
            load_tm(chunk);
            gdn_cp_async_wait<0>();
        }
        __syncthreads();

        // T and M are lower triangular
        float ds[2][4] = { { 0.0f } };
        for (int i = 0; i < row_w + 16; i += 8) {
            const gdn_frag_a a = gdn_load_a(sT + row_w * GDN_LDT + i, GDN_LDT, 1, lg, lt);
#pragma unroll
            for (int n = 0; n < 2; ++n) { gdn_mma(ds[n], a, gdn_load_b(sX + i * GDN_LDS + col_w + n * 8, GDN_LDS, 1, lg, lt)); }
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int l = 0; l < 4; ++l) { sX[(row_w + lg + (l / 2) * 8) * GDN_LDS + col_w + n * 8 + lt * 2 + l % 2] = ds[n][l]; }
        }
        __syncthreads();

        for (int i = 0; i < row_w + 16; i += 8) {
            const gdn_frag_a a = gdn_load_a(sM + row_w * GDN_LDT + i, GDN_LDT, 1, lg, lt);
#pragma unroll
            for (int n = 0; n < 2; ++n) { gdn_mma(os[n], a, gdn_load_b(sX + i * GDN_LDS + col_w + n * 8, GDN_LDS, 1, lg, lt)); }
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int l = 0; l < 2; ++l) {
                const int row = row_w + lg + l * 8;
                const int col = col_w + n * 8 + lt * 2;
                if (row < valid) { *(float2 *) (dst + (int64_t) (t0 + row) * H * GDN_D + col) = make_float2(os[n][2 * l + 0], os[n][2 * l + 1]); }
            }
        }

        // The tensor cores round towards zero. To add up over all chunks there would be a bias.
        float dS[GDN_N / 8][4] = { { 0.0f } };
#pragma unroll 4
        for (int i = 0; i < GDN_C; i += 8) {
            const gdn_frag_a a = gdn_load_a(cK + i * GDN_LDK + warp * 16, 1, GDN_LDK, lg, lt, cE + GDN_C + i);
#pragma unroll
            for (int n = 0; n < GDN_N / 8; ++n) { gdn_mma(dS[n], a, gdn_load_b(sX + i * GDN_LDS + n * 8, GDN_LDS, 1, lg, lt)); }
        }
        const float decay = cE[GDN_C - 1];
#pragma unroll
        for (int n = 0; n < GDN_N / 8; ++n) {
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                S[n][l]                                                               = decay * S[n][l] + dS[n][l];
                sS[(warp * 16 + lg + (l / 2) * 8) * GDN_LDS + n * 8 + lt * 2 + l % 2] = S[n][l];
            }
        }
        __syncthreads();

        if constexpr (!prefetch) {
            load_k(chunk + 1);
            load_q(chunk + 1);
        }
    }

#pragma unroll
    for (int n = 0; n < GDN_N / 8; ++n) {
#pragma unroll
        for (int l = 0; l < 4; ++l) { store_state_one(state, types, to + (n * 8 + lt * 2 + l % 2) * GDN_D + warp * 16 + lg + (l / 2) * 8, S[n][l]); }
    }
}

#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA) && CUDART_VERSION >= 12000
#define GDN_HOPPER

// On Hopper the same is computed with operands of FP16, which are split in two as well: 22 bits of them, and a power of two for each row of
// k, q, T and M, and for what a warp has of the state, D and V - diag(exp(b))*K*S. They take half as long as TF32. The first kernel also
// splits k and q; the second one computes everything transposed, so that the results of a product are operands of the next one.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
#define GDN_HOPPER_AVAILABLE
#endif // defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER

#define GDN_KQ_BYTES   (4 * GDN_C * GDN_D * 2) // k and q of a chunk: high and low halves of k, then of q
#define GDN_TRI_BYTES  (10 * 16 * 16 * 2)      // halves of a lower triangular matrix [64, 64]
#define GDN_FACTORS    (5 * GDN_C + 4)         // see gdn_factor; copies are of 16 bytes
#define GDN_HEAD_BYTES (4 * GDN_TRI_BYTES + GDN_FACTORS * 4)
#define GDN_WARPS      8 // that compute; one more copies

// factors for each token, and the decay of the chunk
enum gdn_factor {
    GDN_FACTOR_K  = 0 * GDN_C,
    GDN_FACTOR_KT = 1 * GDN_C,
    GDN_FACTOR_Q  = 2 * GDN_C,
    GDN_FACTOR_T  = 3 * GDN_C,
    GDN_FACTOR_M  = 4 * GDN_C,
    GDN_FACTOR_S  = 5 * GDN_C,
};

#ifdef GDN_HOPPER_AVAILABLE
static __device__ __forceinline__ uint32_t gdn_shared(const void * p) { return (uint32_t) __cvta_generic_to_shared(p); }

// D += A*B for 16x8 values of FP32 and 16 products each
static __device__ __forceinline__ void gdn_mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t b0, const uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void gdn_ldsm(uint32_t (&r)[4], const uint32_t src) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
            : "r"(src)
            : "memory");
}

static __device__ __forceinline__ void gdn_ldsm_trans(uint32_t (&r)[4], const uint32_t src) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
            : "r"(src)
            : "memory");
}

static __device__ __forceinline__ void gdn_sync(const int id, const int nthreads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(nthreads) : "memory");
}

static __device__ __forceinline__ void gdn_arrive(const int id, const int nthreads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(nthreads) : "memory");
}

static __device__ __forceinline__ void gdn_barrier_init(const uint32_t barrier, const int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

static __device__ __forceinline__ void gdn_barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

static __device__ __forceinline__ void gdn_barrier_expect(const uint32_t barrier, const int nbytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(nbytes) : "memory");
}

static __device__ __forceinline__ void gdn_barrier_arrive(const uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void gdn_barrier_wait(const uint32_t barrier, const int parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra end;\n"
                 "bra again;\n"
                 "end:\n"
                 "}\n" ::"r"(barrier),
            "r"(parity)
            : "memory");
}

static __device__ __forceinline__ void gdn_copy(const uint32_t dst, const void * src, const int nbytes, const uint32_t barrier) {
    asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(nbytes), "r"(barrier)
            : "memory");
}

// The power of two that makes the largest of values with absolute values up to max (bits of a float) 2^13 to 2^14, and its inverse.
// FP16 has 11 bits, two of them 22, and the second one none less above 2^-14.
static __device__ __forceinline__ float gdn_scale(const uint32_t max, float & inverse) {
    const uint32_t e = ::max(max >> 23, 14u);
    inverse          = __uint_as_float((e - 13) << 23);
    return __uint_as_float((267 - e) << 23);
}

static __device__ __forceinline__ void gdn_split_f16(const float x, const float y, uint32_t & hi, uint32_t & lo) {
    const half2  h = __floats2half2_rn(x, y);
    const float2 f = __half22float2(h);
    const half2  l = __floats2half2_rn(x - f.x, y - f.y);
    hi             = *(const uint32_t *) &h;
    lo             = *(const uint32_t *) &l;
}

// d += (A_hi + A_lo)*(B_hi + B_lo) for n tiles, without A_lo*B_lo
template <int n>
static __device__ __forceinline__ void gdn_mma_split(float (*d)[4], const uint32_t (&a_hi)[4], const uint32_t (&a_lo)[4], const uint32_t (*b)[4]) {
#pragma unroll
    for (int i = 0; i < n; ++i) { gdn_mma_f16(d[i], a_lo, b[i][0], b[i][1]); }
#pragma unroll
    for (int i = 0; i < n; ++i) { gdn_mma_f16(d[i], a_hi, b[i][2], b[i][3]); }
#pragma unroll
    for (int i = 0; i < n; ++i) { gdn_mma_f16(d[i], a_hi, b[i][0], b[i][1]); }
}

// Index of a block of 16x16 in a lower triangular matrix
static __device__ __forceinline__ int gdn_tri(const int row, const int col) { return row * (row + 1) / 2 + col; }

// Operands of 16 columns: [..., 2 halves, 32 lanes]
static __device__ __forceinline__ void gdn_load_frag(uint32_t (&hi)[4], uint32_t (&lo)[4], const uint4 * p) {
    const uint4 h = p[0];
    const uint4 l = p[32];
    hi[0]         = h.x;
    hi[1]         = h.y;
    hi[2]         = h.z;
    hi[3]         = h.w;
    lo[0]         = l.x;
    lo[1]         = l.y;
    lo[2]         = l.z;
    lo[3]         = l.w;
}

// Results of two tiles as operands, multiplied with s
static __device__ __forceinline__ void gdn_store_frag(uint4 * p, const float (&x)[4], const float (&y)[4], const float s) {
    uint4 hi;
    uint4 lo;
    gdn_split_f16(s * x[0], s * x[1], hi.x, lo.x);
    gdn_split_f16(s * x[2], s * x[3], hi.y, lo.y);
    gdn_split_f16(s * y[0], s * y[1], hi.z, lo.z);
    gdn_split_f16(s * y[2], s * y[3], hi.w, lo.w);
    p[0]  = hi;
    p[32] = lo;
}

template <int n>
static __device__ __forceinline__ float gdn_scale_warp(const float (&x)[n][4], float & inverse) {
    float xmax = 0.0f;
#pragma unroll
    for (int i = 0; i < n; ++i) { xmax = fmaxf(xmax, fmaxf(fmaxf(fabsf(x[i][0]), fabsf(x[i][1])), fmaxf(fabsf(x[i][2]), fabsf(x[i][3])))); }
    return gdn_scale(__reduce_max_sync(0xFFFFFFFF, __float_as_uint(xmax)), inverse);
}

// Operands that a warp keeps, too
static __device__ __forceinline__ void gdn_make_frag(
        uint32_t (&hi)[4], uint32_t (&lo)[4], uint4 * p, const float (&x)[4], const float (&y)[4], const float s) {
    gdn_split_f16(s * x[0], s * x[1], hi[0], lo[0]);
    gdn_split_f16(s * x[2], s * x[3], hi[1], lo[1]);
    gdn_split_f16(s * y[0], s * y[1], hi[2], lo[2]);
    gdn_split_f16(s * y[2], s * y[3], hi[3], lo[3]);
    p[0]  = make_uint4(hi[0], hi[1], hi[2], hi[3]);
    p[32] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
}

// d += S^T * rows^T for 16 rows of the state from row 16*i on, two blocks of 16 tokens
static __device__ __forceinline__ void gdn_times_state(float (&d)[4][4], const uint32_t (&a_hi)[4], const uint32_t (&a_lo)[4], const uint32_t rows,
        const int (&blocks)[2], const int i, const int lane) {
    const uint32_t p = rows + (lane / 16) * (GDN_C * GDN_D * 2) + lane / 8 % 2 * 128 + lane % 8 * 16;
    uint32_t       b[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) { gdn_ldsm(b[n], p + ((2 * blocks[n / 2] + n % 2) * 16 + 2 * i) * 128); }
    gdn_mma_split<4>(d, a_hi, a_lo, b);
}

// d += X^T * L^T for 16 tokens from token 16*j on, L lower triangular, 16 tokens from token 16*block on
static __device__ __forceinline__ void gdn_times_triangular(
        float (*d)[4], const uint32_t (&a_hi)[4], const uint32_t (&a_lo)[4], const uint32_t L, const int block, const int j, const int lane) {
    const uint32_t p = L + (lane / 16) * GDN_TRI_BYTES + lane / 8 % 2 * 128 + lane % 8 * 16 + gdn_tri(block, j) * 4 * 128;
    uint32_t       b[2][4];
    gdn_ldsm(b[0], p);
    gdn_ldsm(b[1], p + 256);
    gdn_mma_split<2>(d, a_hi, a_lo, b);
}

// d += X^T * K for 16 tokens from token 16*j on, 64 columns of K
static __device__ __forceinline__ void gdn_times_keys(
        float (&d)[8][4], const uint32_t (&a_hi)[4], const uint32_t (&a_lo)[4], const uint32_t keys, const int j, const int lane) {
    const uint32_t p = keys + (lane / 16) * (GDN_C * GDN_D * 2) + lane / 8 % 2 * 16 * 128 + lane % 8 * 16 + 2 * j * 16 * 128;
    uint32_t       b[8][4];
#pragma unroll
    for (int n = 0; n < 8; ++n) { gdn_ldsm_trans(b[n], p + n * 128); }
    gdn_mma_split<8>(d, a_hi, a_lo, b);
}

#endif // GDN_HOPPER_AVAILABLE

// K, Q in halves, T, M in halves and the factors of each chunk. Matrices lie as tiles of 8x8 halves.
static __global__ void __launch_bounds__(256, 2) gated_delta_net_hopper_prepare(const float * q, const float * k, const float * g, const float * beta,
        char * kq_d, char * heads_d, const int32_t * offsets, const int n_seqs, const int n_last, const int H, const int neqk1, const int rq3,
        const int n_tokens, const int64_t sq1, const int64_t sq2, const int64_t sq3, const int64_t sb1, const int64_t sb2, const int64_t sb3,
        const float scale) {
#ifdef GDN_HOPPER_AVAILABLE
    const int tid                                = threadIdx.x;
    const int head_k                             = blockIdx.y;
    const int n_slots                            = gridDim.x; // of chunks
    const auto [sequence, seq, chunk, t0, valid] = gdn_find_chunk<256>(offsets, n_seqs, n_tokens, n_last, sq2, sb2, q, k, g, beta);

    const int warp   = tid / 32;
    const int lane   = tid % 32;
    const int lg     = lane / 4;
    const int lt     = lane % 4;
    const int group  = warp / 4; // has one of two heads
    const int tid_g  = tid % 128;
    const int warp_g = warp % 4;

    if (valid <= 0) { return; }

    constexpr int     half_bytes = GDN_C * GDN_D * 2;
    constexpr int     tri_floats = GDN_C * GDN_LDT;
    extern __shared__ __align__(128) char gdn_smem_h[];
    float *                               sL   = (float *) (gdn_smem_h + GDN_KQ_BYTES); // [2]
    float *                               sV   = sL + 2 * tri_floats;                   // [2] sums of g, their rounding errors, beta
    float *                               sI   = sV + 2 * 3 * GDN_C;                    // inverse scales of k and q
    float *                               sP   = sI + 2 * GDN_C;                        // [2] sums of g > 0
    uint32_t *                            sMax = (uint32_t *) (sP + 2);                 // largest value of k
    // the inverse is made where k and q were
    float *       sT  = (float *) gdn_smem_h + group * (tri_floats + 32 * GDN_LDP);
    float *       sPr = sT + tri_floats;
    const float * sLg = sL + group * tri_floats;
    float *       sVg = sV + group * 3 * GDN_C;

    if (tid == 0) { *sMax = 0; }
    __syncthreads();

    char * kq = kq_d + ((int64_t) head_k * n_slots + blockIdx.x) * GDN_KQ_BYTES;
    {
        // each warp has 8 tokens, each lane 8 of 32 elements
        const int     row    = warp * 8 + lane % 8;
        const int64_t offset = sequence / rq3 * sq3 + (t0 + (row < valid ? row : 0)) * sq2 + head_k * sq1 + lane / 8 * 8;
        float4        vals[2][8];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int i = 0; i < 8; ++i) { vals[m][i] = *(const float4 *) ((m == 0 ? k : q) + offset + (i / 2) * 32 + (i % 2) * 4); }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            float vmax = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float4 x = vals[m][i];
                vmax           = fmaxf(vmax, fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))));
            }
            vmax = fmaxf(vmax, __shfl_xor_sync(0xFFFFFFFF, vmax, 8, 32));
            vmax = fmaxf(vmax, __shfl_xor_sync(0xFFFFFFFF, vmax, 16, 32));
            float       inverse;
            const float s = row < valid ? gdn_scale(__float_as_uint(vmax), inverse) : (inverse = 0.0f);
            if (lane < 8) {
                sI[m * GDN_C + row] = inverse;
                if (m == 0 && row < valid) { atomicMax(sMax, __float_as_uint(vmax)); }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float4 x = vals[m][2 * i + 0];
                const float4 y = vals[m][2 * i + 1];
                uint4        hi;
                uint4        lo;
                gdn_split_f16(s * x.x, s * x.y, hi.x, lo.x);
                gdn_split_f16(s * x.z, s * x.w, hi.y, lo.y);
                gdn_split_f16(s * y.x, s * y.y, hi.z, lo.z);
                gdn_split_f16(s * y.z, s * y.w, hi.w, lo.w);
                const int at                              = 2 * m * half_bytes + (warp * 16 + i * 4 + lane / 8) * 128 + lane % 8 * 16;
                *(uint4 *) (gdn_smem_h + at)              = hi;
                *(uint4 *) (gdn_smem_h + at + half_bytes) = lo;
                *(uint4 *) (kq + at)                      = hi;
                *(uint4 *) (kq + at + half_bytes)         = lo;
            }
        }
    }
    __syncthreads();

    // blocks of 16x16 of K*K^T and Q*K^T up to the diagonal, 3 of 20 a warp
    float acc[3][2][4] = { { { 0.0f } } };
    {
        uint32_t pa[3];
        uint32_t pb[3];
#pragma unroll
        for (int b = 0; b < 3; ++b) {
            const int index = (warp + b * GDN_WARPS) % 20;
            const int tri   = index % 10;
            const int bi    = tri >= 6 ? 3 : tri >= 3 ? 2 : tri >= 1 ? 1 : 0;
            const int bj    = tri - gdn_tri(bi, 0);
            pa[b]           = gdn_shared(gdn_smem_h) + index / 10 * 2 * half_bytes + ((2 * bi + lane / 8 % 2) * 16 + lane / 16) * 128 + lane % 8 * 16;
            pb[b]           = gdn_shared(gdn_smem_h) + ((2 * bj + lane / 16) * 16 + lane / 8 % 2) * 128 + lane % 8 * 16;
        }
#pragma unroll
        for (int i = 0; i < GDN_D / 16; ++i) {
#pragma unroll
            for (int b = 0; b < 3; ++b) {
                if (b < 2 || warp < 20 - 2 * GDN_WARPS) {
                    uint32_t a_hi[4], a_lo[4], b_hi[4], b_lo[4];
                    gdn_ldsm(a_hi, pa[b] + i * 256);
                    gdn_ldsm(a_lo, pa[b] + i * 256 + half_bytes);
                    gdn_ldsm(b_hi, pb[b] + i * 256);
                    gdn_ldsm(b_lo, pb[b] + i * 256 + half_bytes);
                    const uint32_t bs[2][4] = {
                        { b_hi[0], b_hi[1], b_lo[0], b_lo[1] },
                        { b_hi[2], b_hi[3], b_lo[2], b_lo[3] }
                    };
                    gdn_mma_split<2>(acc[b], a_hi, a_lo, bs);
                }
            }
        }
    }

    // |q, k| < 2^35 as scaled; M below 2^16 in halves
    float       k_inverse;
    const float k_scale = gdn_scale(*sMax, k_inverse);

    for (int head0 = head_k; head0 < H; head0 += 2 * neqk1) {
        __syncthreads(); // k and q, or what the previous heads have left

        if (warp_g == 0) {
            // exp() of differences of the sums must be as good as that of single values: keep the rounding errors
            const int  head = head0 + group * neqk1;
            const bool have = head < H;
            float      x[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int     t      = 2 * lane + i;
                const int64_t offset = sequence * sb3 + (t0 + t) * sb2 + head * sb1;
                x[i]                 = have && t < valid ? g[offset] : 0.0f;
                sVg[2 * GDN_C + t]   = have && t < valid ? beta[offset] : 0.0f;
            }
            const auto two_sum = [](const float a, const float b, float & err) {
                const float s = a + b;
                const float y = s - a;
                err += (a - (s - y)) + (b - y);
                return s;
            };
            float err = 0.0f;
            float sum = two_sum(x[0], x[1], err);
            float pos = fmaxf(x[0], 0.0f) + fmaxf(x[1], 0.0f);
#pragma unroll
            for (int o = 1; o < 32; o *= 2) {
                const float sum_o = __shfl_up_sync(0xFFFFFFFF, sum, o, 32);
                const float err_o = __shfl_up_sync(0xFFFFFFFF, err, o, 32);
                pos += __shfl_xor_sync(0xFFFFFFFF, pos, o, 32);
                if (lane >= o) {
                    err += err_o;
                    sum = two_sum(sum_o, sum, err);
                }
            }
            float sum_0 = __shfl_up_sync(0xFFFFFFFF, sum, 1, 32);
            float err_0 = __shfl_up_sync(0xFFFFFFFF, err, 1, 32);
            if (lane == 0) {
                sum_0     = 0.0f;
                err_0     = 0.0f;
                sP[group] = pos;
            }
            sum_0                     = two_sum(sum_0, x[0], err_0);
            sVg[2 * lane + 0]         = sum_0;
            sVg[2 * lane + 1]         = sum;
            sVg[GDN_C + 2 * lane + 0] = err_0;
            sVg[GDN_C + 2 * lane + 1] = err;
        }
        __syncthreads();

#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int head = head0 + h * neqk1;
            if (head < H) {
                char *        out   = heads_d + ((int64_t) head * n_slots + blockIdx.x) * GDN_HEAD_BYTES;
                const float * sSum  = sV + h * 3 * GDN_C;
                const float * sErr  = sSum + GDN_C;
                const float * sBeta = sErr + GDN_C;
                const int     grow  = 17 + min((int) ceilf(1.5f * sP[h]), 100); // decays may be above 1
                const float   m_fac = k_scale * __uint_as_float((127 - grow) << 23);
                const float   m_inv = k_inverse * __uint_as_float((127 + grow) << 23);
#pragma unroll
                for (int b = 0; b < 3; ++b) {
                    const int index = warp + b * GDN_WARPS;
                    if (index >= 20) { continue; }
                    const int  tri  = index % 10;
                    const int  bi   = tri >= 6 ? 3 : tri >= 3 ? 2 : tri >= 1 ? 1 : 0;
                    const int  bj   = tri - gdn_tri(bi, 0);
                    const bool is_L = index < 10;
                    float2     sum[2], err[2], inv[2];
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        const int col = bj * 16 + n * 8 + lt * 2;
                        sum[n]        = *(const float2 *) (sSum + col);
                        err[n]        = *(const float2 *) (sErr + col);
                        inv[n]        = *(const float2 *) (sI + col);
                    }
                    float vals[2][2][2];
#pragma unroll
                    for (int l = 0; l < 2; ++l) {
                        const int   row   = bi * 16 + lg + l * 8;
                        const float sum_r = sSum[row];
                        const float err_r = sErr[row];
                        const float f     = is_L ? sBeta[row] * sI[row] : scale * m_fac;
#pragma unroll
                        for (int n = 0; n < 2; ++n) {
                            const int  col  = bj * 16 + n * 8 + lt * 2;
                            const bool have = is_L ? col < row : col <= row;
                            const bool next = is_L ? col + 1 < row : col + 1 <= row;
                            vals[l][n][0]   = have ? f * inv[n].x * acc[b][n][2 * l + 0] * expf((sum_r - sum[n].x) + (err_r - err[n].x)) : 0.0f;
                            vals[l][n][1]   = next ? f * inv[n].y * acc[b][n][2 * l + 1] * expf((sum_r - sum[n].y) + (err_r - err[n].y)) : 0.0f;
                        }
                    }
#pragma unroll
                    for (int l = 0; l < 2; ++l) {
#pragma unroll
                        for (int n = 0; n < 2; ++n) {
                            if (is_L) {
                                *(float2 *) (sL + h * tri_floats + (bi * 16 + lg + l * 8) * GDN_LDT + bj * 16 + n * 8 + lt * 2) =
                                        make_float2(vals[l][n][0], vals[l][n][1]);
                            } else {
                                uint32_t hi, lo;
                                gdn_split_f16(vals[l][n][0], vals[l][n][1], hi, lo);
                                char * p                          = out + 2 * GDN_TRI_BYTES + (tri * 4 + 2 * l + n) * 128 + lg * 16 + lt * 4;
                                *(uint32_t *) p                   = hi;
                                *(uint32_t *) (p + GDN_TRI_BYTES) = lo;
                            }
                        }
                    }
                }
                if (group == h && tid_g < GDN_C) {
                    float *     factors            = (float *) (out + 4 * GDN_TRI_BYTES);
                    const float b                  = expf(sSum[tid_g] + sErr[tid_g]);
                    const float db                 = expf((sSum[GDN_C - 1] - sSum[tid_g]) + (sErr[GDN_C - 1] - sErr[tid_g]));
                    factors[GDN_FACTOR_K + tid_g]  = b * sI[tid_g];
                    factors[GDN_FACTOR_KT + tid_g] = db * sI[tid_g];
                    factors[GDN_FACTOR_Q + tid_g]  = scale * b * sI[GDN_C + tid_g];
                    factors[GDN_FACTOR_M + tid_g]  = sI[GDN_C + tid_g] * m_inv;
                    if (tid_g == GDN_C - 1) { *(float4 *) (factors + GDN_FACTOR_S) = make_float4(b, 0.0f, 0.0f, 0.0f); }
                }
            }
        }
        for (int i = tid_g; i < tri_floats / 4; i += 128) { ((float4 *) sT)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f); }
        __syncthreads();

        // (I + L)^-1: blocks of 16 by forward substitution, a thread for each column
        if (tid_g < GDN_C) {
            const int base = tid_g / 16 * 16;
            const int col  = tid_g % 16;
            float     x[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                x[i] = i == col ? 1.0f : 0.0f;
#pragma unroll
                for (int m = 0; m < i; ++m) { x[i] -= sLg[(base + i) * GDN_LDT + base + m] * x[m]; }
                sT[(base + i) * GDN_LDT + base + col] = x[i];
            }
        }
        __syncthreads();

        // then blocks of n rows below the diagonal, -T22 * L21 * T11, for 16 and 32
#pragma unroll
        for (int level = 0; level < 2; ++level) {
            const int     n    = level == 0 ? 16 : 32;
            const int     base = level == 0 ? warp_g / 2 * 32 : 0;
            const int     row  = level == 0 ? 0 : warp_g / 2 * 16;
            const int     col  = level == 0 ? warp_g % 2 * 8 : warp_g % 2 * 16;
            const float * L21  = sLg + (base + n) * GDN_LDT + base;
            const float * T11  = sT + base * GDN_LDT + base;
            const float * T22  = sT + (base + n) * GDN_LDT + base + n;
            float *       T21  = sT + (base + n) * GDN_LDT + base;
            float *       P    = sPr + (level == 0 ? base / 2 * GDN_LDP : 0);
#pragma unroll
            for (int product = 0; product < 2; ++product) {
                const float * x       = product == 0 ? L21 : T22;
                const float * y       = product == 0 ? T11 : P;
                const int     ldy     = product == 0 ? GDN_LDT : GDN_LDP;
                float         d[2][4] = { { 0.0f } };
#pragma unroll
                for (int i = 0; i < n; i += 8) {
                    const gdn_frag_a a = gdn_load_a(x + row * GDN_LDT + i, GDN_LDT, 1, lg, lt);
#pragma unroll
                    for (int j = 0; j <= level; ++j) { gdn_mma(d[j], a, gdn_load_b(y + i * ldy + col + j * 8, ldy, 1, lg, lt)); }
                }
#pragma unroll
                for (int j = 0; j <= level; ++j) {
#pragma unroll
                    for (int l = 0; l < 4; ++l) {
                        const int r = row + lg + (l / 2) * 8;
                        const int c = col + j * 8 + lt * 2 + l % 2;
                        if (product == 0) {
                            P[r * GDN_LDP + c] = d[j][l];
                        } else {
                            T21[r * GDN_LDT + c] = -d[j][l];
                        }
                    }
                }
                __syncthreads();
            }
        }

        // each row of T in halves, a thread for half of the columns
        const int head = head0 + group * neqk1;
        if (head < H) {
            char *    out  = heads_d + ((int64_t) head * n_slots + blockIdx.x) * GDN_HEAD_BYTES;
            const int row  = tid_g % GDN_C;
            float     vmax = 0.0f;
#pragma unroll
            for (int i = 0; i < GDN_C; i += 4) { // T is zero above the diagonal
                const float4 x = *(const float4 *) (sT + row * GDN_LDT + i);
                const float4 b = *(const float4 *) (sVg + 2 * GDN_C + i);
                vmax           = fmaxf(vmax, fmaxf(fmaxf(fabsf(x.x * b.x), fabsf(x.y * b.y)), fmaxf(fabsf(x.z * b.z), fabsf(x.w * b.w))));
            }
            float       inverse;
            const float s = gdn_scale(__float_as_uint(vmax), inverse);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int col = i * 16 + tid_g / GDN_C * 8;
                if (i <= row / 16) {
                    const float4 x0 = *(const float4 *) (sT + row * GDN_LDT + col);
                    const float4 x1 = *(const float4 *) (sT + row * GDN_LDT + col + 4);
                    const float4 b0 = *(const float4 *) (sVg + 2 * GDN_C + col);
                    const float4 b1 = *(const float4 *) (sVg + 2 * GDN_C + col + 4);
                    uint4        hi;
                    uint4        lo;
                    gdn_split_f16(s * (x0.x * b0.x), s * (x0.y * b0.y), hi.x, lo.x);
                    gdn_split_f16(s * (x0.z * b0.z), s * (x0.w * b0.w), hi.y, lo.y);
                    gdn_split_f16(s * (x1.x * b1.x), s * (x1.y * b1.y), hi.z, lo.z);
                    gdn_split_f16(s * (x1.z * b1.z), s * (x1.w * b1.w), hi.w, lo.w);
                    char * p                       = out + (gdn_tri(row / 16, i) * 4 + row / 8 % 2 * 2 + tid_g / GDN_C) * 128 + row % 8 * 16;
                    *(uint4 *) p                   = hi;
                    *(uint4 *) (p + GDN_TRI_BYTES) = lo;
                }
            }
            if (tid_g < GDN_C) { ((float *) (out + 4 * GDN_TRI_BYTES))[GDN_FACTOR_T + row] = inverse; }
        }
    }
#else
    GGML_UNUSED_VARS(q, k, g, beta, kq_d, heads_d, offsets, n_seqs, n_last, H, neqk1, rq3, n_tokens, sq1, sq2, sq3, sb1, sb2, sb3, scale);
    NO_DEVICE_CODE;
#endif // GDN_HOPPER_AVAILABLE
}

// A block has 32 columns of the state of a head. A pair of its warps has 16 of them: each warp keeps 64 of the 128 rows of the state,
// computes D for 32 of the 64 tokens of a chunk, and the pair exchanges both through shared memory: each product begins with what a warp
// has itself. Another pair computes the outputs, meanwhile.
// One more warp has chunks copied to shared memory, two of them ahead.
static __global__ void __launch_bounds__(32 * (GDN_WARPS + 1), 1) gated_delta_net_hopper(const char * kq_d, const char * heads_d, const float * v,
        const void * curr_state, const int32_t * ids, float * dst, void * state, const ggml_cuda_gdn_types types, const int32_t * ids_to,
        const int32_t * offsets, const int n_last, const int n_slots, const int H, const int neqk1, const int n_tokens_each, const int n_tokens_dst,
        const int64_t sv1, const int64_t sv2, const int64_t sv3) {
#ifdef GDN_HOPPER_AVAILABLE
    const int col0     = blockIdx.x * GDN_N;
    const int head     = blockIdx.y;
    const int sequence = blockIdx.z;
    const int warp     = threadIdx.x / 32;
    const int lane     = threadIdx.x % 32;
    const int lg       = lane / 4;
    const int lt       = lane % 4;

    const gdn_sequence seq = gdn_find_sequence(offsets, sequence, n_tokens_each, n_last, n_tokens_dst);

    const int n_tokens = seq.n_tokens;
    const int n_chunks = (n_tokens + GDN_C - 1) / GDN_C;

    if (n_tokens == 0) { return; }

    constexpr int     stage_bytes = GDN_KQ_BYTES + GDN_HEAD_BYTES;
    constexpr int     half_bytes  = GDN_C * GDN_D * 2;
    extern __shared__ __align__(128) char gdn_smem_h[];
    uint4 *                               sS    = (uint4 *) (gdn_smem_h + 2 * stage_bytes); // [2 pairs, 8 blocks of 16 rows, 2, 32] state
    uint4 *                               sX    = sS + 2 * 8 * 64;              // [2 pairs, 4 blocks of 16 tokens, 2, 32] V - diag(exp(b))*K*S
    uint4 *                               sD    = sX + 2 * 4 * 64;              // same: D
    uint4 *                               sDK   = sD + 2 * 4 * 64;              // same: diag(exp(b[63] - b))*D
    float *                               sI    = (float *) (sDK + 2 * 4 * 64); // [2 pairs, 4, 2 warps] inverse scales of these
    const uint32_t                        full  = gdn_shared(sI + 16);          // [2 stages]
    const uint32_t                        empty = full + 16;

    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; ++s) {
            gdn_barrier_init(full + 8 * s, 1);
            gdn_barrier_init(empty + 8 * s, GDN_WARPS);
        }
        gdn_barrier_init_done();
    }
    __syncthreads();

    if (warp == GDN_WARPS) {
        kq_d += ((int64_t) (head % neqk1) * n_slots + seq.first_chunk) * GDN_KQ_BYTES;
        heads_d += ((int64_t) head * n_slots + seq.first_chunk) * GDN_HEAD_BYTES;
        for (int chunk = 0; chunk < n_chunks; ++chunk) {
            const int s = chunk % 2;
            if (lane == 0) {
                if (chunk >= 2) { gdn_barrier_wait(empty + 8 * s, (chunk / 2 - 1) % 2); }
                gdn_barrier_expect(full + 8 * s, stage_bytes);
                const uint32_t stage = gdn_shared(gdn_smem_h) + s * stage_bytes;
                gdn_copy(stage, kq_d + (int64_t) chunk * GDN_KQ_BYTES, GDN_KQ_BYTES, full + 8 * s);
                gdn_copy(stage + GDN_KQ_BYTES, heads_d + (int64_t) chunk * GDN_HEAD_BYTES, GDN_HEAD_BYTES, full + 8 * s);
            }
        }
    } else {
        const int pair      = warp / 2 % 2;
        const int w         = warp % 2;
        const int blocks[2] = { w, 3 - w }; // of 16 tokens that this warp has
        const int others[2] = { 1 - w, 2 + w };

        uint4 * S      = sS + pair * 8 * 64 + lane;
        uint4 * X      = sX + pair * 4 * 64 + lane;
        uint4 * D      = sD + pair * 4 * 64 + lane;
        uint4 * DK     = sDK + pair * 4 * 64 + lane;
        float * inv_S  = sI + pair * 8;
        float * inv_X  = inv_S + 2;
        float * inv_D  = inv_S + 4;
        float * inv_DK = inv_S + 6;

        // named barriers: of the pair, and between it and that of the outputs
        const int sync_pair = 1 + pair; // S and X are written
        const int sync_D    = 3 + pair; // D is written, S is read
        const int sync_K    = 5 + pair; // the pair has K*S: the other one begins with Q*S, for both at once would delay K*S
        const int sync_M    = 7 + pair; // D is read

        // The stage of the chunk before, which has been read only when its products are under way: an arrival right behind the loads may overtake
        //     them, and the next chunk but one is written over these.
        const auto release_before = [&](const int chunk) {
            __syncwarp();
            if (chunk > 0 && lane == 0) { gdn_barrier_arrive(empty + 8 * ((chunk - 1) % 2)); }
        };

        uint32_t a_hi[4][4];
        uint32_t a_lo[4][4];

        if (warp < GDN_WARPS / 2) {
            // The state is stored transposed, a column is contiguous.
            // note: the state may lie where the new one goes: a warp reads its part here, before it writes it below
            const int     col      = col0 + pair * 16 + lg; // and 8 more
            const int64_t state_id = ids ? ids[sequence] : sequence;
            const int64_t state_to = ids_to ? ids_to[sequence] : sequence;
            const int64_t from     = ((state_id * H + head) * GDN_D + col) * GDN_D + w * 64;
            const int64_t to       = ((state_to * H + head) * GDN_D + col) * GDN_D + w * 64;
            float         st[8][4];
#pragma unroll
            for (int n = 0; n < 8; ++n) {
#pragma unroll
                for (int l = 0; l < 2; ++l) {
                    const float2 x   = state_id < 0 ? make_float2(0.0f, 0.0f) :
                                                      load_state_two(curr_state, types.from_f16, from + l * 8 * GDN_D + n * 8 + lt * 2);
                    st[n][2 * l + 0] = x.x;
                    st[n][2 * l + 1] = x.y;
                }
            }

            v += sequence * sv3 + seq.first * sv2 + head * sv1 + col;
            float      vals[4][4];
            const auto load_v = [&](const int chunk) {
#pragma unroll
                for (int n = 0; n < 4; ++n) {
#pragma unroll
                    for (int l = 0; l < 4; ++l) {
                        const int t = chunk * GDN_C + blocks[n / 2] * 16 + n % 2 * 8 + lt * 2 + l % 2;
                        vals[n][l]  = t < n_tokens ? v[t * sv2 + (l / 2) * 8] : 0.0f;
                    }
                }
            };
            load_v(0);

            for (int chunk = 0; chunk < n_chunks; ++chunk) {
                const int      s       = chunk % 2;
                const uint32_t stage   = gdn_shared(gdn_smem_h) + s * stage_bytes;
                const float *  factors = (const float *) (gdn_smem_h + s * stage_bytes + GDN_KQ_BYTES + 4 * GDN_TRI_BYTES);
                float          x[4][4];
                float          i_DK; // inverse scales: i0 of what this warp has, i1 of what the other one has

                {
                    float       i0;
                    const float f = gdn_scale_warp(st, i0);
#pragma unroll
                    for (int i = 0; i < 4; ++i) { gdn_make_frag(a_hi[i], a_lo[i], S + (w * 4 + i) * 64, st[2 * i], st[2 * i + 1], f); }
                    if (lane == 0) { inv_S[w] = i0; }
                    gdn_barrier_wait(full + 8 * s, chunk / 2 % 2);
                    release_before(chunk);

                    float d[2][4][4] = { { { 0.0f } } };
#pragma unroll
                    for (int i = 0; i < 4; ++i) { gdn_times_state(d[0], a_hi[i], a_lo[i], stage, blocks, w * 4 + i, lane); }
                    gdn_sync(sync_pair, 64);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        gdn_load_frag(a_hi[i], a_lo[i], S + ((1 - w) * 4 + i) * 64);
                        gdn_times_state(d[1], a_hi[i], a_lo[i], stage, blocks, (1 - w) * 4 + i, lane);
                    }
                    gdn_arrive(sync_K, 128);

                    const float i1 = inv_S[1 - w];
#pragma unroll
                    for (int n = 0; n < 4; ++n) {
                        const int    t = blocks[n / 2] * 16 + n % 2 * 8 + lt * 2;
                        const float2 f = *(const float2 *) (factors + GDN_FACTOR_K + t);
#pragma unroll
                        for (int l = 0; l < 4; ++l) { x[n][l] = vals[n][l] - (l % 2 ? f.y : f.x) * (d[0][n][l] * i0 + d[1][n][l] * i1); }
                    }
                }
                {
                    float       i0;
                    const float f = gdn_scale_warp(x, i0);
#pragma unroll
                    for (int o = 0; o < 2; ++o) { gdn_make_frag(a_hi[o], a_lo[o], X + blocks[o] * 64, x[2 * o], x[2 * o + 1], f); }
                    if (lane == 0) { inv_X[w] = i0; }

                    load_v(chunk + 1);
                    const uint32_t T          = stage + GDN_KQ_BYTES;
                    float          d[2][4][4] = { { { 0.0f } } };
                    gdn_times_triangular(&d[0][0], a_hi[0], a_lo[0], T, blocks[0], blocks[0], lane);
                    gdn_times_triangular(&d[0][2], a_hi[0], a_lo[0], T, blocks[1], blocks[0], lane);
                    gdn_times_triangular(&d[0][2], a_hi[1], a_lo[1], T, blocks[1], blocks[1], lane);
                    gdn_sync(sync_pair, 64);
                    gdn_load_frag(a_hi[2], a_lo[2], X + others[0] * 64);
                    gdn_times_triangular(&d[1][2], a_hi[2], a_lo[2], T, blocks[1], others[0], lane);
                    if (w == 0) {
                        gdn_load_frag(a_hi[3], a_lo[3], X + others[1] * 64);
                        gdn_times_triangular(&d[1][2], a_hi[3], a_lo[3], T, blocks[1], others[1], lane);
                    } else {
                        gdn_times_triangular(&d[1][0], a_hi[2], a_lo[2], T, blocks[0], others[0], lane);
                    }
                    const float i1 = inv_X[1 - w];
#pragma unroll
                    for (int n = 0; n < 4; ++n) {
                        const int    t = blocks[n / 2] * 16 + n % 2 * 8 + lt * 2;
                        const float2 f = *(const float2 *) (factors + GDN_FACTOR_T + t);
                        const float2 k = *(const float2 *) (factors + GDN_FACTOR_KT + t);
#pragma unroll
                        for (int l = 0; l < 4; ++l) {
                            x[n][l]    = (l % 2 ? f.y : f.x) * (d[0][n][l] * i0 + d[1][n][l] * i1);
                            d[0][n][l] = (l % 2 ? k.y : k.x) * x[n][l];
                        }
                    }
                    float       i_D;
                    const float f_D = gdn_scale_warp(x, i_D);
                    const float f_K = gdn_scale_warp(d[0], i_DK);
                    if (chunk > 0) { gdn_sync(sync_M, 128); }
#pragma unroll
                    for (int o = 0; o < 2; ++o) {
                        gdn_make_frag(a_hi[o], a_lo[o], DK + blocks[o] * 64, d[0][2 * o], d[0][2 * o + 1], f_K);
                        gdn_store_frag(D + blocks[o] * 64, x[2 * o], x[2 * o + 1], f_D);
                    }
                    if (lane == 0) {
                        inv_D[w]  = i_D;
                        inv_DK[w] = i_DK;
                    }
                }

                // The tensor cores round towards zero. To add up over all chunks there would be a bias.
                const float decay = factors[GDN_FACTOR_S];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float d[8][4] = { { 0.0f } };
                    if (h == 1) {
                        gdn_sync(sync_D, 128);
                        gdn_load_frag(a_hi[0], a_lo[0], DK + others[0] * 64);
                        gdn_load_frag(a_hi[1], a_lo[1], DK + others[1] * 64);
                    }
#pragma unroll
                    for (int o = 0; o < 2; ++o) { gdn_times_keys(d, a_hi[o], a_lo[o], stage + w * 8 * 128, h == 0 ? blocks[o] : others[o], lane); }
                    const float i = h == 0 ? i_DK : inv_DK[1 - w];
#pragma unroll
                    for (int n = 0; n < 8; ++n) {
#pragma unroll
                        for (int l = 0; l < 4; ++l) { st[n][l] = (h == 0 ? decay * st[n][l] : st[n][l]) + d[n][l] * i; }
                    }
                }
            }

#pragma unroll
            for (int n = 0; n < 8; ++n) {
#pragma unroll
                for (int l = 0; l < 2; ++l) {
                    store_state_two(state, types, to + l * 8 * GDN_D + n * 8 + lt * 2, make_float2(st[n][2 * l], st[n][2 * l + 1]));
                }
            }
        } else {
            dst += (seq.dst_first * H + head) * GDN_D + col0 + pair * 16 + lg;
            for (int chunk = 0; chunk < n_chunks; ++chunk) {
                const int      s       = chunk % 2;
                const uint32_t stage   = gdn_shared(gdn_smem_h) + s * stage_bytes;
                const float *  factors = (const float *) (gdn_smem_h + s * stage_bytes + GDN_KQ_BYTES + 4 * GDN_TRI_BYTES);
                float          out[4][4];

                gdn_barrier_wait(full + 8 * s, chunk / 2 % 2);
                release_before(chunk);
                gdn_sync(sync_K, 128);
                {
                    float d[2][4][4] = { { { 0.0f } } };
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            gdn_load_frag(a_hi[h], a_lo[h], S + (h * 4 + i) * 64);
                            gdn_times_state(d[h], a_hi[h], a_lo[h], stage + 2 * half_bytes, blocks, h * 4 + i, lane);
                        }
                    }
                    const float i0 = inv_S[0];
                    const float i1 = inv_S[1];
#pragma unroll
                    for (int n = 0; n < 4; ++n) {
                        const float2 f = *(const float2 *) (factors + GDN_FACTOR_Q + blocks[n / 2] * 16 + n % 2 * 8 + lt * 2);
#pragma unroll
                        for (int l = 0; l < 4; ++l) { out[n][l] = (l % 2 ? f.y : f.x) * (d[0][n][l] * i0 + d[1][n][l] * i1); }
                    }
                }
                gdn_sync(sync_D, 128);
                {
                    const uint32_t M          = stage + GDN_KQ_BYTES + 2 * GDN_TRI_BYTES;
                    float          d[2][4][4] = { { { 0.0f } } };
#pragma unroll
                    for (int o = 0; o < 2; ++o) {
                        gdn_load_frag(a_hi[o], a_lo[o], D + blocks[o] * 64);
                        gdn_load_frag(a_hi[2 + o], a_lo[2 + o], D + others[o] * 64);
                    }
                    gdn_times_triangular(&d[0][0], a_hi[0], a_lo[0], M, blocks[0], blocks[0], lane);
                    gdn_times_triangular(&d[0][2], a_hi[0], a_lo[0], M, blocks[1], blocks[0], lane);
                    gdn_times_triangular(&d[1][2], a_hi[2], a_lo[2], M, blocks[1], others[0], lane);
                    gdn_times_triangular(&d[0][2], a_hi[1], a_lo[1], M, blocks[1], blocks[1], lane);
                    if (w == 0) {
                        gdn_times_triangular(&d[1][2], a_hi[3], a_lo[3], M, blocks[1], others[1], lane);
                    } else {
                        gdn_times_triangular(&d[1][0], a_hi[2], a_lo[2], M, blocks[0], others[0], lane);
                    }
                    const float i0 = inv_D[w];
                    const float i1 = inv_D[1 - w];
                    if (chunk + 1 < n_chunks) { gdn_arrive(sync_M, 128); }
#pragma unroll
                    for (int n = 0; n < 4; ++n) {
                        const float2 f = *(const float2 *) (factors + GDN_FACTOR_M + blocks[n / 2] * 16 + n % 2 * 8 + lt * 2);
#pragma unroll
                        for (int l = 0; l < 4; ++l) { out[n][l] += (l % 2 ? f.y : f.x) * (d[0][n][l] * i0 + d[1][n][l] * i1); }
                    }
                }
#pragma unroll
                for (int n = 0; n < 4; ++n) {
#pragma unroll
                    for (int l = 0; l < 4; ++l) {
                        const int t = chunk * GDN_C + blocks[n / 2] * 16 + n % 2 * 8 + lt * 2 + l % 2;
                        if (t < n_tokens) { dst[(int64_t) t * H * GDN_D + (l / 2) * 8] = out[n][l]; }
                    }
                }
            }
        }
    }
#else
    GGML_UNUSED_VARS(kq_d, heads_d, v, curr_state, ids, dst, state, types, ids_to, offsets, n_last, n_slots, H, neqk1, n_tokens_each, n_tokens_dst,
            sv1, sv2, sv3);
    NO_DEVICE_CODE;
#endif // GDN_HOPPER_AVAILABLE
}

static int64_t gdn_n_slots(const ggml_cuda_gdn_args & args, const int64_t n_tokens); // of chunks

static constexpr size_t gdn_hopper_prepare_bytes = GDN_KQ_BYTES + (2 * GDN_C * GDN_LDT + 2 * 3 * GDN_C + 2 * GDN_C + 4) * sizeof(float);
static constexpr size_t gdn_hopper_bytes =
        2 * (GDN_KQ_BYTES + GDN_HEAD_BYTES) + (2 * 8 + 3 * 2 * 4) * 64 * sizeof(uint4) + 16 * sizeof(float) + 4 * sizeof(uint64_t);

static bool gated_delta_net_hopper_supported(const int cc) {
    static const char * env_c   = getenv("GGML_CUDA_GDN_HOPPER");
    static const bool   enabled = env_c == nullptr || atoi(env_c) != 0;
    return cc == GGML_CUDA_CC_HOPPER && ggml_cuda_highest_compiled_arch(cc) >= GGML_CUDA_CC_HOPPER && enabled;
}

static void gated_delta_net_hopper_launch(
        ggml_backend_cuda_context & ctx, const ggml_cuda_gdn_args & args, const int64_t n_tokens, cudaStream_t stream) {
    const int64_t n_slots = gdn_n_slots(args, n_tokens);

    ggml_cuda_pool_alloc<char> kq(ctx.pool(), n_slots * args.neqk1 * GDN_KQ_BYTES);
    ggml_cuda_pool_alloc<char> heads(ctx.pool(), n_slots * args.H * GDN_HEAD_BYTES);

    CUDA_SET_SHARED_MEMORY_LIMIT(gated_delta_net_hopper_prepare, gdn_hopper_prepare_bytes);
    gated_delta_net_hopper_prepare<<<dim3(n_slots, args.neqk1), 256, gdn_hopper_prepare_bytes, stream>>>(args.q, args.k, args.g, args.beta, kq.get(),
            heads.get(), args.offsets, args.n_seqs, args.n_last, args.H, args.neqk1, args.rq3, n_tokens, args.sq1, args.sq2, args.sq3, args.sb1,
            args.sb2, args.sb3, 1.0f / sqrtf((float) GDN_D));
    CUDA_CHECK(cudaGetLastError());

    CUDA_SET_SHARED_MEMORY_LIMIT(gated_delta_net_hopper, gdn_hopper_bytes);
    gated_delta_net_hopper<<<dim3(GDN_D / GDN_N, args.H, args.n_seqs), 32 * (GDN_WARPS + 1), gdn_hopper_bytes, stream>>>(kq.get(), heads.get(),
            args.v, args.curr_state, args.ids, args.dst, args.state, args.types, args.ids_to, args.offsets, args.n_last, n_slots, args.H, args.neqk1,
            n_tokens, args.n_tokens, args.sv1, args.sv2, args.sv3);
    CUDA_CHECK(cudaGetLastError());
}
#endif // GDN_HOPPER

static int64_t gdn_n_slots(const ggml_cuda_gdn_args & args, const int64_t n_tokens) {
    return args.offsets ? args.n_tokens / GDN_C + args.n_seqs : args.n_seqs * ((n_tokens + GDN_C - 1) / GDN_C);
}

bool ggml_cuda_gated_delta_net_chunked_supported(const ggml_cuda_gdn_args & args, const int cc) {
    // The loads are of 16 bytes for q and k, 8 bytes for v.
    const bool aligned = args.sq1 % 4 == 0 && args.sq2 % 4 == 0 && args.sq3 % 4 == 0 && args.sv1 % 2 == 0 && args.sv2 % 2 == 0 && args.sv3 % 2 == 0 &&
                         (uintptr_t) args.q % 16 == 0 && (uintptr_t) args.k % 16 == 0 && (uintptr_t) args.v % 8 == 0 && (uintptr_t) args.dst % 8 == 0;
    return ampere_mma_available(cc) && args.S_v == GDN_D && aligned;
}

void ggml_cuda_gated_delta_net_chunked(
        ggml_backend_cuda_context & ctx, const ggml_cuda_gdn_args & args, const int64_t n_tokens, cudaStream_t stream) {
#ifdef GDN_HOPPER
    if (gated_delta_net_hopper_supported(ggml_cuda_info().devices[ctx.device].cc)) {
        gated_delta_net_hopper_launch(ctx, args, n_tokens, stream);
        return;
    }
#endif // GDN_HOPPER

    const int     id      = ggml_cuda_get_device();
    const size_t  smpbo   = ggml_cuda_info().devices[id].smpbo;
    const int64_t n_slots = gdn_n_slots(args, n_tokens);
    const float   scale   = 1.0f / sqrtf((float) GDN_D);

    ggml_cuda_pool_alloc<float> T(ctx.pool(), n_slots * args.H * GDN_C * GDN_C);
    ggml_cuda_pool_alloc<float> M(ctx.pool(), n_slots * args.H * GDN_C * GDN_C);
    ggml_cuda_pool_alloc<float> E(ctx.pool(), n_slots * args.H * GDN_C * 2);

    {
        const size_t nbytes_shared = (2 * GDN_C * GDN_LDK + 4 * GDN_C) * sizeof(float);
        const dim3   grid(n_slots, args.neqk1);
        CUDA_SET_SHARED_MEMORY_LIMIT((gated_delta_net_prepare), nbytes_shared);
        gated_delta_net_prepare<<<grid, 128, nbytes_shared, stream>>>(args.q, args.k, args.g, args.beta, T.get(), M.get(), E.get(), args.offsets,
                args.n_seqs, args.n_last, args.H, args.neqk1, args.rq3, n_tokens, args.sq1, args.sq2, args.sq3, args.sb1, args.sb2, args.sb3, scale);
        CUDA_CHECK(cudaGetLastError());
    }

    const size_t nbytes_shared   = (GDN_C * GDN_LDK + 2 * GDN_C * GDN_LDT + (GDN_D + GDN_C) * GDN_LDS + 4 * GDN_C) * sizeof(float);
    const size_t nbytes_prefetch = nbytes_shared + 2 * GDN_C * GDN_LDK * sizeof(float);
    const dim3   grid(args.H, args.n_seqs, GDN_D / GDN_N);
    if (nbytes_prefetch <= smpbo) {
        CUDA_SET_SHARED_MEMORY_LIMIT((gated_delta_net_chunks<true>), nbytes_prefetch);
        gated_delta_net_chunks<true><<<grid, 256, nbytes_prefetch, stream>>>(args.q, args.k, args.v, T.get(), M.get(), E.get(), args.curr_state,
                args.ids, args.dst, args.state, args.types, args.ids_to, args.offsets, args.n_last, args.H, args.neqk1, args.rq3, n_tokens,
                args.n_tokens, args.sq1, args.sq2, args.sq3, args.sv1, args.sv2, args.sv3, scale);
    } else {
        CUDA_SET_SHARED_MEMORY_LIMIT((gated_delta_net_chunks<false>), nbytes_shared);
        gated_delta_net_chunks<false><<<grid, 256, nbytes_shared, stream>>>(args.q, args.k, args.v, T.get(), M.get(), E.get(), args.curr_state,
                args.ids, args.dst, args.state, args.types, args.ids_to, args.offsets, args.n_last, args.H, args.neqk1, args.rq3, n_tokens,
                args.n_tokens, args.sq1, args.sq2, args.sq3, args.sv1, args.sv2, args.sv3, scale);
    }
    CUDA_CHECK(cudaGetLastError());
}
