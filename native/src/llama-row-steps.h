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

    size_t  upload    = 0; // bytes of the requests for the device that are not under way yet
    int32_t n_waiting = 0; // batches that the requests are for and that are not decoded yet
    int32_t n_decoded = 0; // and those that are
    int32_t n_chosen  = 0; // tokens of the latter

    ggml_context_ptr        ctx; // of `tokens` and `hidden`
    ggml_backend_buffer_ptr tokens_buffer;
    ggml_tensor * tokens = nullptr; // I32 [2 * LLAMA_ROW_QUEUED], what was chosen: by row of the last pass or, of several batches, of all; behind
                                    // these by request
    ggml_tensor * hidden = nullptr; // F32 [n_embd, n_ubatch], by token of the last pass, for the next one; NULL if the context gives none

    ggml_backend_buffer_ptr results_buffer, pinned, device, scratch;
    llama_row_result *      results   = nullptr;
    int32_t                 n_results = 0;

    ggml_backend_t         backend = nullptr; // whose launches are to be waited for
    ggml_backend_event_ptr chosen;            // the last launch is done
    llama_row_launch_t     launch = nullptr;
};
