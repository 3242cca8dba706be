// The sampler of rows on the device, which libllama finds by its name (llama_row_launch_t).
#pragma once

#include "../../../src/llama-row-sampler.h"
#include "common.cuh"
#include "ggml-backend-impl.h"

extern "C" bool ggml_backend_cuda_sample_rows(ggml_backend_t backend, const llama_row_launch * launch);
