#include "mmvq-rows.cuh"
#include "bulk-copy.cuh"
#include "cp-async.cuh"
#include "unary.cuh"
#include "vecdotq.cuh"

// A warp has a row at a time of one matrix or of two (up and its gate), or two rows of one matrix. It copies them in pieces into a ring in
//     shared memory (cp.async.bulk), the first ones before the kernel in front of this one has written the column: weights are there already.
// Values are added up in the order of mul_mat_vec_q with four warps: which of four sums a super-block goes to follows from its place in the row.

static constexpr int MMVQ_ROWS_WARPS      = 4;
static constexpr int MMVQ_ROWS_BLOCKS     = 4;          // a multiprocessor
static constexpr int MMVQ_ROWS_SMEM       = 208 * 1024; // of them together: with blocks of the next product beside them they are slower
static constexpr int MMVQ_ROWS_PIECE      = 3072;       // bytes of a row at a time, at most
static constexpr int MMVQ_ROWS_MAX_STAGES = 8;

struct mmvq_rows_params {
    const char *  x;    // rows
    const char *  gate; // rows of the gate, or nullptr
    const void *  y;    // block_q8_1
    const float * bias; // added to the product, or nullptr
    float *       dst;
    int           nrows;
    int           nsuper; // super-blocks in a row
    int           piece;  // super-blocks in a piece
    int           slot;   // bytes in the ring for a piece of a row
    int           nstages;
    bool          early; // nothing in front of this kernel writes the rows
};

template <ggml_type type>
struct mmvq_rows_traits;

template <>
struct mmvq_rows_traits<GGML_TYPE_Q4_K> {
    static constexpr int                    vdr    = VDR_Q4_K_Q8_1_MMVQ;
    static constexpr int                    nbytes = sizeof(block_q4_K);
    static __device__ __forceinline__ float vec_dot(const void * x, const block_q8_1 * y, const int kbx, const int kqs) {
        return vec_dot_q4_K_q8_1(x, y, kbx, kqs);
    }
};

template <>
struct mmvq_rows_traits<GGML_TYPE_Q5_K> {
    static constexpr int                    vdr    = VDR_Q5_K_Q8_1_MMVQ;
    static constexpr int                    nbytes = sizeof(block_q5_K);
    static __device__ __forceinline__ float vec_dot(const void * x, const block_q8_1 * y, const int kbx, const int kqs) {
        return vec_dot_q5_K_q8_1(x, y, kbx, kqs);
    }
};

template <>
struct mmvq_rows_traits<GGML_TYPE_Q6_K> {
    static constexpr int                    vdr    = VDR_Q6_K_Q8_1_MMVQ;
    static constexpr int                    nbytes = sizeof(block_q6_K);
    static __device__ __forceinline__ float vec_dot(const void * x, const block_q8_1 * y, const int kbx, const int kqs) {
        return vec_dot_q6_K_q8_1(x, y, kbx, kqs);
    }
};

template <ggml_type type>
static constexpr __host__ __device__ int mmvq_rows_per_step() { // super-blocks that a warp multiplies at a time
    return mmvq_rows_traits<type>::vdr * WARP_SIZE / ggml_cuda_type_traits<type>::qi;
}

// nx: rows of the matrix at a time
template <ggml_type type, int nx, bool has_gate>
static __global__ void __launch_bounds__(MMVQ_ROWS_WARPS * WARP_SIZE) mul_mat_vec_q_rows(const mmvq_rows_params p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
    constexpr int nr       = has_gate ? 2 : nx;
    constexpr int bs       = mmvq_rows_traits<type>::nbytes;
    constexpr int lanes    = ggml_cuda_type_traits<type>::qi / mmvq_rows_traits<type>::vdr; // of a super-block
    constexpr int per_step = mmvq_rows_per_step<type>();
    static_assert(!has_gate || nx == 1, "a row and its gate");

    extern __shared__ char mmvq_rows_smem[];
    __shared__ uint64_t    barriers[MMVQ_ROWS_WARPS][MMVQ_ROWS_MAX_STAGES];

    ggml_cuda_pdl_lc();

    const int lane = threadIdx.x;
    const int warp = threadIdx.y;
    const int kqs  = mmvq_rows_traits<type>::vdr * (lane % lanes);

    const uint32_t full = ggml_cuda_cvta_generic_to_shared(barriers[warp]);
    char *         ring = mmvq_rows_smem + warp * p.nstages * nr * p.slot;

    const int64_t row_bytes = (int64_t) p.nsuper * bs;
    const int     ngroups   = p.nrows / nx;
    const int     npieces   = (p.nsuper + p.piece - 1) / p.piece;
    const int     group0    = blockIdx.x + gridDim.x * warp; // all blocks have as many warps with rows
    const int     step      = gridDim.x * MMVQ_ROWS_WARPS;

    const auto row_data = [&](const int group, const int i) {
        return (has_gate && i == 1 ? p.gate : p.x) + (int64_t) (group * nx + (has_gate ? 0 : i)) * row_bytes;
    };

    const uint64_t policy = bulk_policy_evict_first();

    // what is copied next
    int        copy_group = group0;
    int        copy_piece = 0;
    const auto copy       = [&](const int stage) {
        if (copy_group >= ngroups) { return; }
        const int    nbytes = min(p.piece, p.nsuper - copy_piece * p.piece) * bs;
        const char * from[nr];
        int          size[nr];
        int          total = 0;
#pragma unroll
        for (int i = 0; i < nr; ++i) { // 16 bytes at a time
            const char * src = row_data(copy_group, i) + copy_piece * p.piece * bs;
            const int    off = (uintptr_t) src % 16;
            from[i]          = src - off;
            size[i]          = GGML_PAD(off + nbytes, 16);
            total += size[i];
        }
        bulk_barrier_expect(full + 8 * stage, total);
#pragma unroll
        for (int i = 0; i < nr; ++i) {
            bulk_copy(ggml_cuda_cvta_generic_to_shared(ring + (stage * nr + i) * p.slot), from[i], size[i], full + 8 * stage, policy);
        }
        if (++copy_piece == npieces) {
            copy_piece = 0;
            copy_group += step;
        }
    };

    if (!p.early) { ggml_cuda_pdl_sync(); }
    if (lane == 0) {
        for (int s = 0; s < p.nstages; ++s) { bulk_barrier_init(full + 8 * s, 1); }
        bulk_barrier_init_fence();
        for (int s = 0; s < p.nstages; ++s) { copy(s); }
    }
    __syncwarp();
    if (p.early) { ggml_cuda_pdl_sync(); }

    int stage  = 0;
    int parity = 0;
    for (int group = group0; group < ngroups; group += step) {
        float bias = 0.0f;
        if (lane < nx && p.bias != nullptr) { bias = p.bias[group * nx + lane]; }

        float sums[nr][4] = { { 0.0f } };
        for (int piece = 0; piece < npieces; ++piece) {
            const block_q8_1 * y      = (const block_q8_1 *) p.y + piece * p.piece * (QK_K / QK8_1);
            const int          nsuper = min(p.piece, p.nsuper - piece * p.piece);
            const char *       x[nr];
#pragma unroll
            for (int i = 0; i < nr; ++i) {
                x[i] = ring + (stage * nr + i) * p.slot;
                if constexpr (bs % 16 != 0) { x[i] += (uintptr_t) (row_data(group, i) + piece * p.piece * bs) % 16; }
            }

            bulk_barrier_wait(full + 8 * stage, parity);

            int k0 = 0;
            for (; k0 + 4 * per_step <= nsuper; k0 += 4 * per_step) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int kbx = k0 + j * per_step + lane / lanes;
#pragma unroll
                    for (int i = 0; i < nr; ++i) { sums[i][j] += mmvq_rows_traits<type>::vec_dot(x[i], y + kbx * (QK_K / QK8_1), kbx, kqs); }
                }
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int kbx = k0 + j * per_step + lane / lanes;
                if (kbx < nsuper) {
#pragma unroll
                    for (int i = 0; i < nr; ++i) { sums[i][j] += mmvq_rows_traits<type>::vec_dot(x[i], y + kbx * (QK_K / QK8_1), kbx, kqs); }
                }
            }

            __syncwarp();
            if (lane == 0) { copy(stage); }
            if (++stage == p.nstages) {
                stage = 0;
                parity ^= 1;
            }
        }

        float result[nr];
#pragma unroll
        for (int i = 0; i < nr; ++i) { result[i] = warp_reduce_sum(((sums[i][0] + sums[i][1]) + sums[i][2]) + sums[i][3]); }
        if (lane < nx) {
            float value = result[0];
            if constexpr (!has_gate && nx == 2) { value = lane == 0 ? result[0] : result[1]; }
            value += bias;
            if constexpr (has_gate) { value *= ggml_cuda_op_silu_single(result[1]); }
            p.dst[group * nx + lane] = value;
        }
    }
#else
    GGML_UNUSED(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
}

template <ggml_type type, int nx, bool has_gate>
static void launch_mul_mat_vec_q_rows(mmvq_rows_params p, const int nsm, cudaStream_t stream) {
    constexpr int nr         = has_gate ? 2 : nx;
    constexpr int bs         = mmvq_rows_traits<type>::nbytes;
    constexpr int four_steps = 4 * mmvq_rows_per_step<type>();

    p.piece           = p.nsuper * bs <= MMVQ_ROWS_PIECE ? p.nsuper : std::max(1, MMVQ_ROWS_PIECE / (four_steps * bs)) * four_steps;
    p.slot            = GGML_PAD(p.piece * bs, 16) + (bs % 16 == 0 ? 0 : 16);
    p.nstages         = std::max(1, std::min(MMVQ_ROWS_MAX_STAGES, MMVQ_ROWS_SMEM / MMVQ_ROWS_BLOCKS / (MMVQ_ROWS_WARPS * nr * p.slot)));
    const size_t smem = MMVQ_ROWS_WARPS * p.nstages * nr * p.slot;
    CUDA_SET_SHARED_MEMORY_LIMIT((mul_mat_vec_q_rows<type, nx, has_gate>), MMVQ_ROWS_SMEM / MMVQ_ROWS_BLOCKS);
    const ggml_cuda_kernel_launch_params params(dim3(std::min(p.nrows / nx, nsm * MMVQ_ROWS_BLOCKS)), dim3(WARP_SIZE, MMVQ_ROWS_WARPS), smem, stream);
    ggml_cuda_kernel_launch(mul_mat_vec_q_rows<type, nx, has_gate>, params, p);
}

template <ggml_type type>
static void mul_mat_vec_q_rows_switch(const mmvq_rows_params & p, const int nsm, cudaStream_t stream) {
    if (p.gate != nullptr) {
        launch_mul_mat_vec_q_rows<type, 1, true>(p, nsm, stream);
    } else if (p.nrows % 2 == 0 && p.nrows >= 16 * nsm) { // two rows a warp share the column
        launch_mul_mat_vec_q_rows<type, 2, false>(p, nsm, stream);
    } else {
        launch_mul_mat_vec_q_rows<type, 1, false>(p, nsm, stream);
    }
}

bool ggml_cuda_mmvq_rows_on() {
    static const char * env_c = getenv("GGML_CUDA_MMVQ_ROWS");
    static const bool   on    = env_c == nullptr || atoi(env_c) != 0;
    return on;
}

bool ggml_cuda_should_use_mmvq_rows(
        const int cc, const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * dst, const ggml_cuda_mm_fusion_args_device & fusion) {
    if (!ggml_cuda_mmvq_rows_on() || cc != GGML_CUDA_CC_HOPPER || ggml_cuda_highest_compiled_arch(cc) < GGML_CUDA_CC_HOPPER ||
            (src0->type != GGML_TYPE_Q4_K && src0->type != GGML_TYPE_Q5_K && src0->type != GGML_TYPE_Q6_K)) {
        return false;
    }
    return ggml_is_contiguous(src0) && ggml_nrows(src0) == src0->ne[1] && ggml_nrows(src1) == 1 && ggml_is_contiguous(dst) &&
           ggml_nbytes(src0) % 16 == 0 && (uintptr_t) src0->data % 16 == 0 && (uintptr_t) fusion.gate % 16 == 0 && fusion.gate_bias == nullptr &&
           fusion.x_scale == nullptr && fusion.gate_scale == nullptr && (fusion.gate == nullptr || fusion.glu_op == GGML_GLU_OP_SWIGLU);
}

void ggml_cuda_mul_mat_vec_q_rows(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const void * y, ggml_tensor * dst,
        const ggml_cuda_mm_fusion_args_device & fusion) {
    mmvq_rows_params p{};
    p.x           = (const char *) src0->data;
    p.gate        = (const char *) fusion.gate;
    p.y           = y;
    p.bias        = (const float *) fusion.x_bias;
    p.dst         = (float *) dst->data;
    p.nrows       = src0->ne[1];
    p.nsuper      = src0->ne[0] / QK_K;
    p.early       = ggml_backend_buffer_get_usage(src0->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    const int nsm = ggml_cuda_info().devices[ctx.device].nsm;
    switch (src0->type) {
        case GGML_TYPE_Q4_K:
            mul_mat_vec_q_rows_switch<GGML_TYPE_Q4_K>(p, nsm, ctx.stream());
            break;
        case GGML_TYPE_Q5_K:
            mul_mat_vec_q_rows_switch<GGML_TYPE_Q5_K>(p, nsm, ctx.stream());
            break;
        case GGML_TYPE_Q6_K:
            mul_mat_vec_q_rows_switch<GGML_TYPE_Q6_K>(p, nsm, ctx.stream());
            break;
        default:
            GGML_ABORT("fatal error");
    }
}
