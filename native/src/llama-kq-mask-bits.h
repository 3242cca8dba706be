#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

// A KQ mask made where it is read, from a bit for each value: a sixteenth of what the host writes and copies.
//
// GGML_OP_CUSTOM: a CPU calls its function, CUDA knows it by its name (kq-mask-bits.cu).

static constexpr const char * LLAMA_KQ_MASK_OF_BITS = "kq_mask_of_bits";

// bits are in words of 64
static constexpr int64_t LLAMA_KQ_MASK_BITS_PAD = 64;

static inline bool llama_is_kq_mask_of_bits(const ggml_tensor * op) {
    return op->op == GGML_OP_CUSTOM && op->src[0] && op->src[0]->type == GGML_TYPE_I32 && std::strcmp(op->name, LLAMA_KQ_MASK_OF_BITS) == 0;
}

// value i is 0 if bit i is set, otherwise -INF
static inline void llama_kq_mask_of_bits_compute(ggml_tensor * dst, int ith, int nth, void * /*userdata*/) {
    const auto *  words = (const uint32_t *) dst->src[0]->data;
    const int64_t n     = ggml_nelements(dst);
    const int64_t i1    = n / 32 * (ith + 1) / nth * 32;

    for (int64_t i = n / 32 * ith / nth * 32; i < i1; ++i) {
        const bool keep = words[i / 32] >> (i % 32) & 1;
        if (dst->type == GGML_TYPE_F16) {
            ((ggml_fp16_t *) dst->data)[i] = keep ? 0 : 0xFC00;
        } else {
            ((float *) dst->data)[i] = keep ? 0.0f : -INFINITY;
        }
    }
}

// bits: I32 [n_kv/32, n_rows, 1, n_stream]. Returns F16 or F32 [n_kv, n_rows, 1, n_stream]
static inline ggml_tensor * llama_kq_mask_of_bits(ggml_context * ctx, ggml_tensor * bits, ggml_type type) {
    GGML_ASSERT(bits->type == GGML_TYPE_I32 && ggml_is_contiguous(bits) && (type == GGML_TYPE_F16 || type == GGML_TYPE_F32));

    ggml_tensor * res = ggml_custom_4d(
            ctx, type, 32 * bits->ne[0], bits->ne[1], bits->ne[2], bits->ne[3], &bits, 1, llama_kq_mask_of_bits_compute, GGML_N_TASKS_MAX, nullptr);
    return ggml_set_name(res, LLAMA_KQ_MASK_OF_BITS);
}

// whether there is a GPU, and each computes it. LLAMA_KQ_MASK_BITS=0: never, =1: on CPUs, too
static inline bool llama_kq_mask_bits_wanted(ggml_backend_sched_t sched, ggml_tensor * op) {
    static const char * env = getenv("LLAMA_KQ_MASK_BITS");
    if (env && std::atoi(env) == 0) { return false; }

    bool gpu = env != nullptr;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        if (!ggml_backend_supports_op(backend, op)) { return false; }
        gpu = gpu || ggml_backend_dev_type(ggml_backend_get_device(backend)) == GGML_BACKEND_DEVICE_TYPE_GPU;
    }
    return gpu;
}
