// Where the rows of a context's batches are sampled.
#pragma once

#include "ggml-cpp.h"
#include "llama-row-state.h"

struct llama_row_steps {
    llama_row_requests   requests;   // for the host
    std::vector<int32_t> which;      // by index in the batch, the request, or -1
    std::vector<float>   copies;     // of rows that the host samples
    int32_t              n_real = 0; // tokens that are no padding

    std::vector<int32_t>    places; // by request, the place of its whole row in `wholes`, or -1
    ggml_backend_buffer_ptr wholes;

    size_t upload  = 0;     // bytes of the requests for the device that are not under way yet
    bool   waiting = false; // for the next batch

    ggml_context_ptr        ctx; // of `tokens`
    ggml_backend_buffer_ptr tokens_buffer;
    ggml_tensor *           tokens = nullptr; // I32 [LLAMA_ROW_MOST], by row of the last pass: what was chosen

    ggml_backend_buffer_ptr results_buffer, pinned, device, scratch;
    llama_row_result *      results   = nullptr;
    int32_t                 n_results = 0;

    ggml_backend_t     backend = nullptr; // whose launches are to be waited for
    llama_row_launch_t launch  = nullptr;
};
