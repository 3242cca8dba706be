#include "mmf-tma.cuh"
#include "cluster-launch.cuh"
#include "cp-async.cuh"

#ifdef GGML_CUDA_USE_TMA

// A block multiplies 64*mtiles rows of a matrix with all columns. One thread has the tensor memory accelerator copy tiles of 64 elements
//     of K, of rows and of columns, into a ring in shared memory; 4 warps have 16*mtiles rows each and all columns.
//     Rows are copied before the kernel in front of this one has written the columns (ggml_cuda_pdl_sync).
// With several splits the blocks of a cluster share the elements of K, and add up what they have in the order of their ranks. The
//     number of splits follows from the matrices alone: a column's result does not depend on the other columns, nor on their number.
static constexpr int MMF_TMA_K          = 64; // elements of a tile of the ring: 128 bytes, in the order of CU_TENSOR_MAP_SWIZZLE_128B
static constexpr int MMF_TMA_WARPS      = 4;  // and one more that copies
static constexpr int MMF_TMA_MAX_STAGES = 8;

// What the rows are. Blocks become FP16 in registers, with the bits of ggml_get_to_fp16_cuda: a product of them has the bits of one with the
//     copy, and reads 4.5, 6.6 or 8.5 bits an element.
enum mmf_tma_source { MMF_TMA_F16, MMF_TMA_BF16, MMF_TMA_Q4_K, MMF_TMA_Q6_K, MMF_TMA_Q8_0 };

static constexpr __host__ __device__ bool mmf_tma_has_blocks(const mmf_tma_source source) { return source != MMF_TMA_F16 && source != MMF_TMA_BF16; }

static constexpr __host__ __device__ int mmf_tma_rows(const int mtiles) { return MMF_TMA_WARPS * 16 * mtiles; }

// tiles of MMF_TMA_K elements in a stage of the ring
static constexpr __host__ __device__ int mmf_tma_stage_tiles(const mmf_tma_source source) {
    return mmf_tma_has_blocks(source) ? QK_K / MMF_TMA_K : 1;
}

// bytes of the elements of a stage in a row
static constexpr __host__ __device__ int mmf_tma_row_bytes(const mmf_tma_source source) {
    return source == MMF_TMA_Q4_K ? (int) sizeof(block_q4_K) :
           source == MMF_TMA_Q6_K ? (int) sizeof(block_q6_K) :
           source == MMF_TMA_Q8_0 ? QK_K / QK8_0 * (int) sizeof(block_q8_0) :
                                    MMF_TMA_K * (int) sizeof(half);
}

// in the ring, a multiple of 16; a warp reads the blocks of 8 rows without conflicts of banks
static constexpr __host__ __device__ int mmf_tma_row_stride(const mmf_tma_source source) {
    return source == MMF_TMA_Q6_K ? 240 : mmf_tma_row_bytes(source);
}

static constexpr __host__ __device__ int mmf_tma_columns_bytes(const mmf_tma_source source, const int ntiles) {
    return mmf_tma_stage_tiles(source) * 8 * ntiles * MMF_TMA_K * (int) sizeof(half);
}

// scales of a row's block: what a quant is multiplied with, and what is subtracted
static constexpr __host__ __device__ int mmf_tma_scales(const mmf_tma_source source) {
    return source == MMF_TMA_Q4_K ? 8 : source == MMF_TMA_Q6_K ? 16 : 0;
}

// bytes in front of the ring, one more of a row so that there are no conflicts of banks
static constexpr __host__ __device__ int mmf_tma_scales_bytes(const mmf_tma_source source) {
    return mmf_tma_scales(source) == 0 ? 0 : GGML_PAD(mmf_tma_rows(1) * (mmf_tma_scales(source) + 1) * (int) sizeof(float2), 1024);
}

static constexpr __host__ __device__ int mmf_tma_stage_bytes(const mmf_tma_source source, const int mtiles, const int ntiles) {
    return mmf_tma_rows(mtiles) * mmf_tma_row_stride(source) + mmf_tma_columns_bytes(source, ntiles);
}

// blocks of a multiprocessor at once, at most
static constexpr __host__ __device__ int mmf_tma_blocks(const mmf_tma_source source) { return mmf_tma_has_blocks(source) ? 3 : 2; }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < GGML_CUDA_CC_VOLTA
#define MMF_TMA_PARAMS const
#else
#define MMF_TMA_PARAMS const __grid_constant__
#endif // defined(__CUDA_ARCH__) && __CUDA_ARCH__ < GGML_CUDA_CC_VOLTA

struct mmf_tma_params {
    CUtensorMap a[MMF_TMA_MAX_MATRICES];
    CUtensorMap b;
    float *     dst[MMF_TMA_MAX_MATRICES];
    int         nrows[MMF_TMA_MAX_MATRICES];
    int         tile_end[MMF_TMA_MAX_MATRICES]; // blocks of rows of the matrices up to this one
    int         ncols;
    int         ntiles_k;
    int         nsplits;
    int         nstages;
    int         row_groups; // rows that follow each other are this many groups, of which each is one copy
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER

static __device__ __forceinline__ void mmf_tma_barrier_init(const uint32_t barrier, const int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

static __device__ __forceinline__ void mmf_tma_barrier_expect(const uint32_t barrier, const int nbytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(nbytes) : "memory");
}

static __device__ __forceinline__ void mmf_tma_barrier_arrive(const uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void mmf_tma_barrier_wait(const uint32_t barrier, const int parity) {
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

static __device__ __forceinline__ void mmf_tma_copy(
        const uint32_t dst, const CUtensorMap * map, const int k, const int row, const uint32_t barrier, const uint64_t policy) {
    asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dst),
            "l"(map), "r"(k), "r"(row), "r"(barrier), "l"(policy)
            : "memory");
}

static __device__ __forceinline__ void mmf_tma_load(uint32_t r[4], const uint32_t src) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(src));
}

template <mmf_tma_source source>
static __device__ __forceinline__ void mmf_tma_mma(float c[4], const uint32_t a[4], const uint32_t b0, const uint32_t b1) {
    if constexpr (source == MMF_TMA_BF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Two lanes write the scales of a row's block: d1 and m1 of dequantize_q4_K, of dequantize_q6_K d*scale and 32 times that, which are exact.
//     The quants are subnormal FP16: bits from 0 or from 4 on (mmf_tma_pair), 2^-24 or 2^-20 of their value.
template <mmf_tma_source source>
static __device__ __forceinline__ void mmf_tma_write_scales(float2 * dst, const char * row, const int part) {
    if constexpr (source == MMF_TMA_Q4_K) {
        const uint4    x = *(const uint4 *) row;
        const float2   d = __half22float2(*(const half2 *) &x.x);
        const uint32_t s = part == 0 ? x.y & 0x3F3F3F3F : (x.w & 0x0F0F0F0F) | ((x.y >> 2) & 0x30303030);
        const uint32_t m = part == 0 ? x.z & 0x3F3F3F3F : ((x.w >> 4) & 0x0F0F0F0F) | ((x.z >> 2) & 0x30303030);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            dst[4 * part + i] = make_float2(d.x * (i % 2 ? 0x1p20f : 0x1p24f) * (float) ((s >> 8 * i) & 0xFF), d.y * (float) ((m >> 8 * i) & 0xFF));
        }
    } else {
        const float   d = __half2float(*(const half *) (row + offsetof(block_q6_K, d)));
        const char2 * s = (const char2 *) (row + offsetof(block_q6_K, scales)) + 4 * part;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float d1    = d * (float) (i % 2 ? s[i / 2].y : s[i / 2].x);
            dst[8 * part + i] = make_float2(d1 * (i >= 4 ? 0x1p20f : 0x1p24f), 32.0f * d1);
        }
    }
}

// two bytes as numbers of 16 bits
static __device__ __forceinline__ uint32_t mmf_tma_bytes(const char * src) { return __byte_perm(*(const uint16_t *) src, 0, 0x4140); }

static __device__ __forceinline__ uint32_t mmf_tma_half2(const uint32_t x, const float2 scale) {
    const float2 q = __half22float2(*reinterpret_cast<const half2 *>(&x));
    const half2  y = __floats2half2_rn(__fmaf_rn(scale.x, q.x, -scale.y), __fmaf_rn(scale.x, q.y, -scale.y));
    return *reinterpret_cast<const uint32_t *>(&y);
}

// Elements 64*tile + 16*kk + at and the next one of a row's blocks. scales: of the row.
template <mmf_tma_source source>
static __device__ __forceinline__ uint32_t mmf_tma_pair(const char * row, const float2 * scales, const int tile, const int kk, const int at) {
    if constexpr (source == MMF_TMA_Q4_K) { // low nibbles of 32 bytes, then the high ones
        const uint32_t qs = mmf_tma_bytes(row + offsetof(block_q4_K, qs) + 32 * tile + 16 * (kk % 2) + at);
        return mmf_tma_half2(qs & (kk < 2 ? 0x000F000F : 0x00F000F0), scales[2 * tile + kk / 2]);
    } else if constexpr (source == MMF_TMA_Q6_K) { // low nibbles of 64 bytes, then the high ones; and 2 bits each of 32 bytes
        const uint32_t ql = mmf_tma_bytes(row + offsetof(block_q6_K, ql) + 64 * (tile / 2) + 16 * kk + at);
        const uint32_t qh = mmf_tma_bytes(row + offsetof(block_q6_K, qh) + 32 * (tile / 2) + 16 * (kk % 2) + at) << (kk < 2 ? 4 : 2);
        const uint32_t q  = tile % 2 == 0 ? (ql & 0x000F000F) | (qh & 0x00300030) : (ql & 0x00F000F0) | (qh & 0x03000300);
        return mmf_tma_half2(q, scales[4 * tile + kk]);
    } else {
        const char *   block = row + (2 * tile + kk / 2) * sizeof(block_q8_0);
        const uint32_t q     = __byte_perm(
                *(const uint16_t *) (block + offsetof(block_q8_0, qs) + 16 * (kk % 2) + at) ^ 0x8080, 0x64, 0x4140); // 1024 + 128 + the quant
        const half2 y = __hmul2(__hsub2(*reinterpret_cast<const half2 *>(&q), __float2half2_rn(1152.0f)), __half2half2(*(const half *) block));
        return *reinterpret_cast<const uint32_t *>(&y);
    }
}
#endif // defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER

// mtiles: 16 rows each, of a warp; ntiles: 8 columns each
template <mmf_tma_source source, int mtiles, int ntiles>
static __global__ void __launch_bounds__(32 * (MMF_TMA_WARPS + 1), mmf_tma_blocks(source)) mul_mat_f_tma(MMF_TMA_PARAMS mmf_tma_params p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
    constexpr bool blocks  = mmf_tma_has_blocks(source);
    constexpr int  rows    = mmf_tma_rows(mtiles);
    constexpr int  tiles   = mmf_tma_stage_tiles(source);
    constexpr int  a_bytes = rows * mmf_tma_row_stride(source);
    constexpr int  b_bytes = 8 * ntiles * MMF_TMA_K * sizeof(half); // of a tile
    constexpr int  stage   = mmf_tma_stage_bytes(source, mtiles, ntiles);
    constexpr int  a_step  = mmf_tma_row_bytes(source) / 2; // of a map's elements

    ggml_cuda_pdl_lc();

    extern __shared__ char mmf_tma_smem[];
    __shared__ uint64_t    barriers[2 * MMF_TMA_MAX_STAGES];

    const int warp  = threadIdx.x / 32;
    const int lane  = threadIdx.x % 32;
    const int split = blockIdx.x % p.nsplits;
    const int tile0 = blockIdx.x / p.nsplits;
    const int step  = gridDim.x / p.nsplits;
    const int k0    = (int) ((int64_t) split * p.ntiles_k / p.nsplits);
    const int nk    = (int) ((int64_t) (split + 1) * p.ntiles_k / p.nsplits) - k0;
    const int s0    = k0 / tiles; // stages: the first and the last one may have tiles of other splits, too
    const int ns    = (k0 + nk + tiles - 1) / tiles - s0;
    const int ntile = p.tile_end[MMF_TMA_MAX_MATRICES - 1];

    const uint32_t full  = ggml_cuda_cvta_generic_to_shared(barriers);
    const uint32_t empty = full + sizeof(uint64_t) * MMF_TMA_MAX_STAGES;
    const uint32_t front = GGML_PAD(ggml_cuda_cvta_generic_to_shared(mmf_tma_smem), 1024);
    const uint32_t ring  = front + mmf_tma_scales_bytes(source);
    char * const   smem  = mmf_tma_smem + (front - ggml_cuda_cvta_generic_to_shared(mmf_tma_smem)); // front, as a pointer

    if (threadIdx.x == 0) {
        for (int s = 0; s < p.nstages; ++s) {
            mmf_tma_barrier_init(full + 8 * s, 1);
            mmf_tma_barrier_init(empty + 8 * s, MMF_TMA_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    const auto find_matrix = [&](const int tile, int & row) {
        int m = 0;
        while (tile >= p.tile_end[m]) { ++m; }
        row = (tile - (m == 0 ? 0 : p.tile_end[m - 1])) * rows;
        return m;
    };

    // Rows whose bytes are no multiple of 16 (Q6_K): the first rows of all groups (mmf_tma_map) are a copy, the second ones, ... A copy begins at
    //     the multiple of 16 below its block.
    const int  row_bytes = p.ntiles_k / tiles * mmf_tma_row_bytes(source);
    const auto copy_rows = [&](const int s, const int m, const int k, const int row, const uint64_t policy) {
        if constexpr (source == MMF_TMA_Q6_K) {
            for (int i = 0; i < p.row_groups; ++i) {
                const int at = (i * row_bytes + k * mmf_tma_row_bytes(source)) & ~15;
                mmf_tma_copy(ring + s * stage + i * (a_bytes / p.row_groups), &p.a[m], at / 2, row / p.row_groups, full + 8 * s, policy);
            }
        } else {
            mmf_tma_copy(ring + s * stage, &p.a[m], k * a_step, row, full + 8 * s, policy);
        }
    };
    const auto row_of = [&](const int r) { // of the r-th row in the ring
        return source == MMF_TMA_Q6_K ? r % (rows / p.row_groups) * p.row_groups + r / (rows / p.row_groups) : r;
    };

    if (warp == MMF_TMA_WARPS) {
        if (lane == 0) {
            uint64_t policy_a; // rows are read once a step, columns by all blocks
            uint64_t policy_b;
            asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy_a));
            asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy_b));
            int it    = 0;
            int early = 0;
            // as many tiles as the ring has are asked for before there are columns
            for (int tile = tile0; tile < ntile && it < p.nstages; tile += step) {
                int       row;
                const int m = find_matrix(tile, row);
                for (int k = 0; k < ns && it < p.nstages; ++k, ++it) {
                    mmf_tma_barrier_expect(full + 8 * it, stage);
                    copy_rows(it, m, s0 + k, row, policy_a);
                }
            }
            early = it;
            ggml_cuda_pdl_sync();
            it        = 0;
            int s     = 0;
            int phase = 0;
            for (int tile = tile0; tile < ntile; tile += step) {
                int       row;
                const int m = find_matrix(tile, row);
                for (int k = 0; k < ns; ++k, ++it) {
                    if (it >= early) {
                        mmf_tma_barrier_wait(empty + 8 * s, phase ^ 1);
                        mmf_tma_barrier_expect(full + 8 * s, stage);
                        copy_rows(s, m, s0 + k, row, policy_a);
                    }
#pragma unroll
                    for (int t = 0; t < tiles; ++t) {
                        mmf_tma_copy(ring + s * stage + a_bytes + t * b_bytes, &p.b, ((s0 + k) * tiles + t) * MMF_TMA_K, 0, full + 8 * s, policy_b);
                    }
                    if (++s == p.nstages) {
                        s = 0;
                        phase ^= 1;
                    }
                }
            }
        }
        __syncwarp();
    } else {
        const int      row_a = warp * 16 * mtiles + lane % 16;
        const int      row_b = lane / 16 * 8 + lane % 8;
        const uint32_t off_a = row_a * 128;
        const uint32_t off_b = a_bytes + row_b * 128;

        // rows of a lane: whose scales it writes, and two that it multiplies; of Q6_K where their first block begins in front of a multiple of 16
        const int lane_rows[3] = { warp * 16 + lane / 2, warp * 16 + lane / 4, warp * 16 + lane / 4 + 8 };
        uint32_t  row_begin[3] = { 0, 0, 0 };
        if constexpr (source == MMF_TMA_Q6_K) {
#pragma unroll
            for (int i = 0; i < 3; ++i) { row_begin[i] = lane_rows[i] / (rows / p.row_groups) * row_bytes; }
        }

        int last  = -1;
        int next  = 0;
        int phase = 0;
        for (int tile = tile0; tile < ntile; tile += step) {
            float acc[mtiles][ntiles][4] = { { { 0.0f } } };

            for (int k = 0; k < ns; ++k) {
                const int s = next;
                mmf_tma_barrier_wait(full + 8 * s, phase);
                // The stage before has been read only when its products are under way: an arrival right behind the loads overtakes them where
                //     stores hold them up, and the next rows are written over these.
                __syncwarp();
                if (last >= 0 && lane == 0) { mmf_tma_barrier_arrive(empty + 8 * last); }
                last = s;
                if (++next == p.nstages) {
                    next = 0;
                    phase ^= 1;
                }
                const uint32_t base = ring + s * stage;
                if constexpr (blocks) {
                    static_assert(mtiles == 1, "rows of other tiles are not addressed");
                    constexpr int nscales     = mmf_tma_scales(source);
                    const char *  stage_rows  = smem + mmf_tma_scales_bytes(source) + s * stage;
                    float2 *      warp_scales = (float2 *) smem + warp * 16 * (nscales + 1);
                    const char *  row[3];
#pragma unroll
                    for (int i = 0; i < 3; ++i) {
                        row[i] = stage_rows + lane_rows[i] * mmf_tma_row_stride(source);
                        if constexpr (source == MMF_TMA_Q6_K) { row[i] += (row_begin[i] + (s0 + k) * mmf_tma_row_bytes(source)) % 16; }
                    }
                    if constexpr (nscales > 0) {
                        mmf_tma_write_scales<source>(warp_scales + lane / 2 * (nscales + 1), row[0], lane % 2);
                        __syncwarp();
                    }
                    // rows lane/4 and lane/4 + 8 of the warp, of each 16 elements these of a lane: 2*(lane%4), + 1, + 8 and + 9
                    const auto multiply = [&](const int t) {
                        uint32_t b[4]; // two tiles of 16 elements and 8 columns, or one and 16 columns
#pragma unroll
                        for (int kk = 0; kk < MMF_TMA_K / 16; ++kk) {
                            uint32_t a[4];
#pragma unroll
                            for (int l = 0; l < 4; ++l) {
                                a[l] = mmf_tma_pair<source>(
                                        row[1 + l % 2], warp_scales + (lane / 4 + 8 * (l % 2)) * (nscales + 1), t, kk, 8 * (l / 2) + 2 * (lane % 4));
                            }
                            if constexpr (ntiles == 1) {
                                if (kk % 2 == 0) {
                                    mmf_tma_load(b, base + a_bytes + t * b_bytes + lane % 8 * 128 +
                                                            (((2 * (kk + lane / 16) + lane / 8 % 2) ^ (lane % 8)) << 4));
                                }
                                mmf_tma_mma<source>(acc[0][0], a, b[2 * (kk % 2) + 0], b[2 * (kk % 2) + 1]);
                            } else {
#pragma unroll
                                for (int j = 0; j < ntiles; j += 2) {
                                    mmf_tma_load(b, base + off_b + t * b_bytes + j * 8 * 128 + (((2 * kk + lane / 8 % 2) ^ (lane % 8)) << 4));
                                    mmf_tma_mma<source>(acc[0][j + 0], a, b[0], b[1]);
                                    mmf_tma_mma<source>(acc[0][j + 1], a, b[2], b[3]);
                                }
                            }
                        }
                    };
                    const int first = max(k0 - (s0 + k) * tiles, 0);
                    const int end   = min(k0 + nk - (s0 + k) * tiles, tiles);
                    if (end - first == tiles) {
#pragma unroll
                        for (int t = 0; t < tiles; ++t) { multiply(t); }
                    } else { // other tiles are those of other splits
#pragma unroll 1
                        for (int t = first; t < end; ++t) { multiply(t); }
                    }
                } else {
#pragma unroll
                    for (int kk = 0; kk < MMF_TMA_K / 16; ++kk) {
                        uint32_t a[mtiles][4];
#pragma unroll
                        for (int i = 0; i < mtiles; ++i) {
                            mmf_tma_load(a[i], base + off_a + i * 16 * 128 + (((2 * kk + lane / 16) ^ (lane % 8)) << 4));
                        }
#pragma unroll
                        for (int j = 0; j < ntiles; j += 2) {
                            uint32_t b[4];
                            mmf_tma_load(b, base + off_b + j * 8 * 128 + (((2 * kk + lane / 8 % 2) ^ (lane % 8)) << 4));
#pragma unroll
                            for (int i = 0; i < mtiles; ++i) {
                                mmf_tma_mma<source>(acc[i][j + 0], a[i], b[0], b[1]);
                                mmf_tma_mma<source>(acc[i][j + 1], a[i], b[2], b[3]);
                            }
                        }
                    }
                }
            }

            if (p.nsplits > 1) {                                                      // and one tile
                asm volatile("bar.sync 1, %0;" ::"n"(32 * MMF_TMA_WARPS) : "memory"); // the ring has been read
                float4 * sums = (float4 *) (smem + mmf_tma_scales_bytes(source));
#pragma unroll
                for (int i = 0; i < mtiles; ++i) {
#pragma unroll
                    for (int j = 0; j < ntiles; ++j) {
                        sums[((warp * mtiles + i) * ntiles + j) * 32 + lane] = make_float4(acc[i][j][0], acc[i][j][1], acc[i][j][2], acc[i][j][3]);
                    }
                }
                break;
            }

            int       row;
            const int m     = find_matrix(tile, row);
            float *   dst   = p.dst[m];
            const int nrows = p.nrows[m];
            ggml_cuda_pdl_sync();
#pragma unroll
            for (int i = 0; i < mtiles; ++i) {
#pragma unroll
                for (int j = 0; j < ntiles; ++j) {
#pragma unroll
                    for (int l = 0; l < 4; ++l) {
                        const int r = row + row_of((warp * mtiles + i) * 16 + lane / 4 + l / 2 * 8);
                        const int c = 8 * j + lane % 4 * 2 + l % 2;
                        if (r < nrows && c < p.ncols) { dst[(int64_t) c * nrows + r] = acc[i][j][l]; }
                    }
                }
            }
        }
    }

    if (p.nsplits > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
        int           row;
        const int     m     = find_matrix(tile0, row);
        float *       dst   = p.dst[m];
        const int     nrows = p.nrows[m];
        constexpr int n     = MMF_TMA_WARPS * mtiles * ntiles * 32;
        ggml_cuda_pdl_sync();
        for (int i = split * n / p.nsplits + threadIdx.x; i < (split + 1) * n / p.nsplits; i += blockDim.x) {
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (int q = 0; q < p.nsplits; ++q) {
                uint32_t src;
                float4   v;
                asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(src) : "r"(ring + 16 * i), "r"(q));
                asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(src) : "memory");
                sum.x += v.x;
                sum.y += v.y;
                sum.z += v.z;
                sum.w += v.w;
            }
            const int r0 = row + row_of(i / (32 * ntiles) * 16 + i % 32 / 4);
            const int r1 = row + row_of(i / (32 * ntiles) * 16 + i % 32 / 4 + 8);
            const int c  = i / 32 % ntiles * 8 + i % 4 * 2;
            if (c < p.ncols) {
                if (r0 < nrows) { dst[(int64_t) c * nrows + r0] = sum.x; }
                if (r1 < nrows) { dst[(int64_t) c * nrows + r1] = sum.z; }
            }
            if (c + 1 < p.ncols) {
                if (r0 < nrows) { dst[(int64_t) (c + 1) * nrows + r0] = sum.y; }
                if (r1 < nrows) { dst[(int64_t) (c + 1) * nrows + r1] = sum.w; }
            }
        }
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
#else
    GGML_UNUSED(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
}

// Rows that follow each other are groups of as many whose bytes are a multiple of 16, which maps ask for
static int64_t mmf_tma_row_groups(const mmf_tma_source source, const int64_t k) {
    int64_t n = 1;
    while (mmf_tma_has_blocks(source) && n * (k / QK_K) * mmf_tma_row_bytes(source) % 16 != 0) { n *= 2; }
    return n;
}

// Rows of ne0 elements that follow each other; tiles of `rows` of them. Blocks are pairs of bytes, and a group of rows is a row of the map.
template <mmf_tma_source source>
static CUtensorMap mmf_tma_map(const void * data, const int64_t ne0, const int64_t ne1, const int rows) {
    constexpr bool   blocks = mmf_tma_has_blocks(source);
    const int64_t    groups = mmf_tma_row_groups(source, ne0);
    const int64_t    width  = blocks ? groups * (ne0 / QK_K) * mmf_tma_row_bytes(source) / 2 : ne0;
    CUtensorMap      map;
    const cuuint64_t dims[2]    = { (cuuint64_t) width, (cuuint64_t) (ne1 / groups) };
    const cuuint64_t strides[1] = { (cuuint64_t) width * 2 };
    const cuuint32_t box[2]     = { (cuuint32_t) mmf_tma_row_stride(source) / 2, (cuuint32_t) (rows / groups) };
    const cuuint32_t ones[2]    = { 1, 1 };
    const auto       type       = blocks                 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 :
                                  source == MMF_TMA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 :
                                                           CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    CU_CHECK(cuTensorMapEncodeTiled(&map, type, 2, (void *) data, dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
            blocks ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return map;
}

template <mmf_tma_source source, int mtiles, int ntiles>
static void mmf_tma_launch(const mmf_tma_matrix * matrices, const int n, const void * columns, const int64_t ncols, const int64_t k,
        const int nsplits, const int device, cudaStream_t stream) {
    mmf_tma_params p;
    int            nt = 0;
    for (int i = 0; i < MMF_TMA_MAX_MATRICES; ++i) {
        const mmf_tma_matrix & matrix = matrices[i < n ? i : 0];
        p.a[i]     = mmf_tma_map<source>(mmf_tma_has_blocks(source) ? matrix.blocks : matrix.rows, k, matrix.nrows, mmf_tma_rows(mtiles));
        p.dst[i]   = matrix.dst;
        p.nrows[i] = matrix.nrows;
        nt += i < n ? (matrix.nrows + mmf_tma_rows(mtiles) - 1) / mmf_tma_rows(mtiles) : 0;
        p.tile_end[i] = nt;
    }
    p.b          = mmf_tma_map<source == MMF_TMA_BF16 ? MMF_TMA_BF16 : MMF_TMA_F16>(columns, k, ncols, 8 * ntiles);
    p.ncols      = ncols;
    p.ntiles_k   = k / MMF_TMA_K;
    p.nsplits    = nsplits;
    p.row_groups = mmf_tma_row_groups(source, k);

    const int nsm    = ggml_cuda_info().devices[device].nsm;
    const int most   = mmf_tma_blocks(source);
    const int nblock = nsplits > 1 ? nt * nsplits : std::min(nt, most * nsm);
    // blocks share a multiprocessor with the small kernels before and after them
    const int     room   = 208 * 1024 / std::min((nblock + nsm - 1) / nsm, most);
    constexpr int stage  = mmf_tma_stage_bytes(source, mtiles, ntiles);
    constexpr int scales = mmf_tma_scales_bytes(source);
    p.nstages            = std::min(MMF_TMA_MAX_STAGES, (room - scales) / stage);
    const int smem       = std::max(p.nstages * stage, nsplits > 1 ? MMF_TMA_WARPS * mtiles * ntiles * 32 * 16 : 0) + scales + 1024;

    static bool prepared[GGML_CUDA_MAX_DEVICES] = { false };
    if (!prepared[device]) {
        CUDA_CHECK(cudaFuncSetAttribute(mul_mat_f_tma<source, mtiles, ntiles>, cudaFuncAttributeMaxDynamicSharedMemorySize, 209 * 1024));
        prepared[device] = true;
    }

    GGML_ASSERT(p.nstages > 1); // a stage is released when the next one is there

    ggml_cuda_kernel_launch_clusters(mul_mat_f_tma<source, mtiles, ntiles>,
            ggml_cuda_kernel_launch_params(dim3(nblock), dim3(32 * (MMF_TMA_WARPS + 1)), smem, stream), dim3(nsplits, 1, 1), p);
}
#endif // GGML_CUDA_USE_TMA

bool ggml_cuda_should_use_mmf_tma(const int cc, const void * rows, const int64_t k, const int64_t ncols) {
#ifdef GGML_CUDA_USE_TMA
    static const char *  env_c    = getenv("GGML_CUDA_MMF_TMA_MAX");
    static const int64_t max_cols = std::min<int64_t>(env_c ? std::atoll(env_c) : MMF_TMA_MAX_COLUMNS, MMF_TMA_MAX_COLUMNS);

    return cc == GGML_CUDA_CC_HOPPER && ggml_cuda_highest_compiled_arch(cc) >= GGML_CUDA_CC_HOPPER && ncols <= max_cols && k % MMF_TMA_K == 0 &&
           (uintptr_t) rows % 16 == 0;
#else
    GGML_UNUSED_VARS(cc, rows, k, ncols);
    return false;
#endif // GGML_CUDA_USE_TMA
}

#ifdef GGML_CUDA_USE_TMA
template <mmf_tma_source source, int mtiles>
static void mmf_tma_launch_columns(const mmf_tma_matrix * matrices, const int n, const void * columns, const int64_t ncols, const int64_t k,
        const int nsplits, const int device, cudaStream_t stream) {
    if (ncols <= 16) {
        mmf_tma_launch<source, mtiles, 2>(matrices, n, columns, ncols, k, nsplits, device, stream);
    } else if (ncols <= 32) {
        mmf_tma_launch<source, mtiles, 4>(matrices, n, columns, ncols, k, nsplits, device, stream);
    } else {
        mmf_tma_launch<source, mtiles, 8>(matrices, n, columns, ncols, k, nsplits, device, stream);
    }
}
#endif // GGML_CUDA_USE_TMA

#ifdef GGML_CUDA_USE_TMA
// F16, which may be BF16: the blocks are not read
static mmf_tma_source mmf_tma_source_of(const void * blocks, const ggml_type type, const int64_t k, const int64_t nrows, const int64_t ncols) {
    // with few columns reading copies takes longer than making FP16 of blocks
    static const char *  env_c    = getenv("GGML_CUDA_MMF_TMA_BLOCKS_MAX");
    static const int64_t max_cols = std::min<int64_t>(env_c ? std::atoll(env_c) : 16, 16);

    const mmf_tma_source source = type == GGML_TYPE_Q4_K ? MMF_TMA_Q4_K :
                                  type == GGML_TYPE_Q6_K ? MMF_TMA_Q6_K :
                                  type == GGML_TYPE_Q8_0 ? MMF_TMA_Q8_0 :
                                                           MMF_TMA_F16;
    const bool           fits =
            blocks != nullptr && (uintptr_t) blocks % 16 == 0 && k % QK_K == 0 && nrows % mmf_tma_row_groups(source, k) == 0 && ncols <= max_cols;
    return fits ? source : MMF_TMA_F16;
}
#endif // GGML_CUDA_USE_TMA

void ggml_cuda_mul_mat_f_tma(ggml_backend_cuda_context & ctx, const mmf_tma_matrix * matrices, const int n, const ggml_type type,
        const void * columns, const int64_t ncols, const int64_t k) {
#ifdef GGML_CUDA_USE_TMA
    GGML_ASSERT(n <= MMF_TMA_MAX_MATRICES && ncols <= MMF_TMA_MAX_COLUMNS && (uintptr_t) columns % 16 == 0);
    const int nsm    = ggml_cuda_info().devices[ctx.device].nsm;
    int       ntiles = 0; // of 64 rows
    for (int i = 0; i < n; ++i) { ntiles += (matrices[i].nrows + 63) / 64; }
    // so many splits that all multiprocessors have blocks
    int nsplits = 1;
    while (ntiles < nsm && nsplits < 8 && 2 * nsplits * ntiles <= 3 * nsm) { nsplits *= 2; }
    mmf_tma_matrix sources[MMF_TMA_Q8_0 + 1][MMF_TMA_MAX_MATRICES];
    int            nsource[MMF_TMA_Q8_0 + 1] = { 0 };
    for (int i = 0; i < n; ++i) {
        const auto source                  = mmf_tma_source_of(matrices[i].blocks, matrices[i].type, k, matrices[i].nrows, ncols);
        sources[source][nsource[source]++] = matrices[i];
    }
    const mmf_tma_matrix * others  = sources[MMF_TMA_F16];
    const int              nothers = nsource[MMF_TMA_F16];
    if (nothers > 0) { // first: they may be few rows, beside which the blocks are asked for
        ntiles = 0;
        for (int i = 0; i < nothers; ++i) { ntiles += (others[i].nrows + 63) / 64; }
        // up to two blocks a multiprocessor at once; the many of a head follow each other in these
        int mtiles = 1;
        if (nsplits > 1) {
            mtiles = nsplits * ntiles > 2 * nsm ? 2 : 1;
        } else if (ntiles > 2 * nsm && ntiles <= 6 * nsm) {
            mtiles = ntiles > 4 * nsm || ncols <= 32 ? 3 : 2;
        }
        const auto launch = type == GGML_TYPE_BF16 ? (mtiles == 1        ? mmf_tma_launch_columns<MMF_TMA_BF16, 1> :
                                                             mtiles == 2 ? mmf_tma_launch_columns<MMF_TMA_BF16, 2> :
                                                                           mmf_tma_launch_columns<MMF_TMA_BF16, 3>) :
                                                     (mtiles == 1        ? mmf_tma_launch_columns<MMF_TMA_F16, 1> :
                                                             mtiles == 2 ? mmf_tma_launch_columns<MMF_TMA_F16, 2> :
                                                                           mmf_tma_launch_columns<MMF_TMA_F16, 3>);
        launch(others, nothers, columns, ncols, k, nsplits, ctx.device, ctx.stream());
    }
    const auto launch_blocks = [&](const mmf_tma_source source, const auto launch) {
        if (nsource[source] > 0) { launch(sources[source], nsource[source], columns, ncols, k, nsplits, ctx.device, ctx.stream()); }
    };
    launch_blocks(MMF_TMA_Q8_0, ncols <= 8 ? mmf_tma_launch<MMF_TMA_Q8_0, 1, 1> : mmf_tma_launch<MMF_TMA_Q8_0, 1, 2>);
    launch_blocks(MMF_TMA_Q6_K, ncols <= 8 ? mmf_tma_launch<MMF_TMA_Q6_K, 1, 1> : mmf_tma_launch<MMF_TMA_Q6_K, 1, 2>);
    launch_blocks(MMF_TMA_Q4_K, ncols <= 8 ? mmf_tma_launch<MMF_TMA_Q4_K, 1, 1> : mmf_tma_launch<MMF_TMA_Q4_K, 1, 2>);
#else
    GGML_UNUSED_VARS(ctx, matrices, n, type, columns, ncols, k);
    GGML_ABORT("fatal error");
#endif // GGML_CUDA_USE_TMA
}
