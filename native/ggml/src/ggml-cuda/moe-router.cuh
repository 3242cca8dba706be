#pragma once

#include "common.cuh"

// The router of experts with few tokens in one kernel: its product, softmax, the best experts and their weights, which add up to 1, and the
// product of a shared expert's gate, which has the same columns.

// gate: nullptr if there is none
bool ggml_cuda_can_fuse_moe_router(
        const ggml_tensor * logits, const ggml_tensor * gate, const ggml_tensor * ids, const ggml_tensor * weights, int cc);

void ggml_cuda_op_moe_router(ggml_backend_cuda_context & ctx, const ggml_tensor * logits, ggml_tensor * gate, ggml_tensor * ids,
        ggml_tensor * weights, float clamp, float scale);
