#pragma once

#include "../../../src/llama-kq-mask-bits.h"
#include "common.cuh"

void ggml_cuda_op_kq_mask_of_bits(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
