#include "common.cuh"

// Products of quantized weights with few columns, by weights that lie in the order in which a warp of tensor cores reads them. They are
//     repacked in place after loading (ggml_backend_cuda_repack_weights) and take no more memory.

static constexpr int MMQ_REPACKED_MAX_COLUMNS  = 64;
static constexpr int MMQ_REPACKED_MAX_MATRICES = 4;
static constexpr int MMQ_REPACKED_MAX_ROWS     = 512 * 1024;

struct mmq_repacked_matrix {
    const void * rows; // repacked, of k elements
    float *      dst;  // columns of nrows elements
    int64_t      nrows;
};

bool ggml_cuda_can_repack(const ggml_tensor * src0, int cc);

// From blocks to repacked weights and back, bit for bit.
void ggml_cuda_repack(const ggml_tensor * src0, const void * blocks, void * repacked, cudaStream_t stream);
void ggml_cuda_unpack(const ggml_tensor * src0, const void * repacked, void * blocks, cudaStream_t stream);

void ggml_cuda_repacked_to_fp16(const ggml_tensor * src0, half * y, cudaStream_t stream);
void ggml_cuda_get_rows_repacked(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Columns in FP16, in the order of mma's operands, and sums of 32 of their elements: GGML_CUDA_QUANTIZED_F16_MMA.
size_t ggml_cuda_mmq_repacked_columns_size(int64_t ncols, int64_t k);
void   ggml_cuda_mmq_repacked_columns(const float * x, void * columns, int64_t ncols, int64_t k, cudaStream_t stream);

// Products with the same columns. A row's result does not depend on the number of columns, with as many multiprocessors.
// The rows are read before the kernels in front of this one have ended: they must be weights.
void ggml_cuda_mul_mat_q_repacked(
        ggml_backend_cuda_context & ctx, const mmq_repacked_matrix * matrices, int n, ggml_type type, const void * columns, int64_t ncols, int64_t k);
