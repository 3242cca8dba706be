#pragma once

// Included by upstream's common.cuh, whose names it uses.

struct ggml_backend_cuda_context;

// What our kernels keep for a stream's context.
struct ggml_cuda_own_state {
    // The columns that were quantized last, for other products with the same: see ggml_cuda_quantized_columns.
    struct {
        void *       buffer = nullptr;
        const char * data   = nullptr; // nullptr: none
        size_t       nbytes = 0;
        int64_t      ne0    = 0;
        int64_t      ne1    = 0;
        size_t       nb1    = 0;
        int          layout = 0;     // ggml_cuda_quantized_layout
        bool         fresh  = false; // put there by the kernel that wrote data
    } quantized;

    int * mmq_mid_counters                            = nullptr;     // zero between launches
    int * mmq_repacked_arrived[GGML_CUDA_MAX_STREAMS] = { nullptr }; // the same
    int * moe_router_arrived[GGML_CUDA_MAX_STREAMS]   = { nullptr }; // the same

    ~ggml_cuda_own_state() {
        CUDA_CHECK(cudaFree(quantized.buffer));
        CUDA_CHECK(cudaFree(mmq_mid_counters));
        for (int * arrived : mmq_repacked_arrived) { CUDA_CHECK(cudaFree(arrived)); }
        for (int * arrived : moe_router_arrived) { CUDA_CHECK(cudaFree(arrived)); }
    }
};

enum ggml_cuda_quantized_layout {
    GGML_CUDA_QUANTIZED_Q8_1,
    GGML_CUDA_QUANTIZED_MMQ_D4,
    GGML_CUDA_QUANTIZED_MMQ_DS4,
    GGML_CUDA_QUANTIZED_MID,
    GGML_CUDA_QUANTIZED_MID_PERMUTED,
    GGML_CUDA_QUANTIZED_F16, // no blocks, each element converted
    GGML_CUDA_QUANTIZED_BF16,
    GGML_CUDA_QUANTIZED_F16_MMA, // FP16 in the order of mma's operands, and sums (mmq-repacked.cuh)
};

// Where a kernel finds the quantized columns of src1, and whether they are there already. They stay until something is written
//     to where src1 is. Returns nullptr if there is no room. A caller that does not find them has to quantize them there.
void * ggml_cuda_quantized_columns(
        ggml_backend_cuda_context & ctx, const ggml_tensor * src1, ggml_cuda_quantized_layout layout, size_t nbytes, bool & found);
