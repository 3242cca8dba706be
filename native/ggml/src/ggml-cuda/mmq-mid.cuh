#include "common.cuh"

#define MMQ_MID_MAX_BATCH_SIZE 64 // Max. number of columns for the kernels of mmq-mid.cu.

bool ggml_cuda_should_use_mmq_mid(const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * dst, int cc);

void ggml_cuda_mul_mat_q_mid(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, ggml_tensor * dst);
