#include "common.cuh"

#if defined(GGML_CUDA_USE_PDL) && defined(GGML_USE_VMM) && CUDART_VERSION >= 12000
#define GGML_CUDA_USE_TMA // libcuda, which has the maps of tensors, is linked for VMM
#endif                    // defined(GGML_CUDA_USE_PDL) && defined(GGML_USE_VMM) && CUDART_VERSION >= 12000

// Products of matrices in FP16 or BF16 with the same few columns, at once, on Hopper. A column has the same bits whatever the other columns
//     are and however many, with as many multiprocessors.

static constexpr int MMF_TMA_MAX_MATRICES = 4;
static constexpr int MMF_TMA_MAX_COLUMNS  = 64;

struct mmf_tma_matrix {
    const void * rows;   // of k elements, they follow each other
    const void * blocks; // that `rows` is the copy of; nullptr: there are none
    ggml_type    type;   // of the blocks
    float *      dst;    // columns of nrows elements
    int64_t      nrows;
};

bool ggml_cuda_should_use_mmf_tma(int cc, const void * rows, int64_t k, int64_t ncols);

// Rows and columns are of one type, GGML_TYPE_F16 or GGML_TYPE_BF16.
// The rows are read before the kernels in front of this one have ended: they must be weights.
void ggml_cuda_mul_mat_f_tma(
        ggml_backend_cuda_context & ctx, const mmf_tma_matrix * matrices, int n, ggml_type type, const void * columns, int64_t ncols, int64_t k);
