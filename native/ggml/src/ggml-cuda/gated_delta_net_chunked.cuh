#pragma once

#include "common.cuh"

#define GGML_CUDA_GDN_CHUNKED_MIN_TOKENS 64

// States are kept in F32 or F16, and computed in F32.
struct ggml_cuda_gdn_types {
    bool from_f16 = false; // states that are read
    bool to_f16   = false; // states that are written
    bool rounded  = false; // to what F16 can hold, after each token or after chunks of them
    int  spare    = -1;    // the state of the cache that nobody reads, so that it need not be written; -1: none
};

// strides in floats; beta has the strides of g
struct ggml_cuda_gdn_args {
    const float *   q;
    const float *   k;
    const float *   v;
    const float *   g;
    const float *   beta;
    const void *    curr_state;
    const int32_t * ids; // may be null
    float *         dst;
    void *          state;
    const int32_t * ids_to; // of states in state, may be null: in order

    int64_t S_v, H, n_tokens, n_seqs; // n_tokens: of each sequence, with offsets of all
    int64_t sq1, sq2, sq3;
    int64_t sv1, sv2, sv3;
    int64_t sb1, sb2, sb3;
    int64_t neqk1, rq3;

    const int32_t * offsets; // [n_seqs + 1] where tokens begin, may be null: n_tokens each; then strides between sequences are 0
    int             n_last;  // the last tokens of a sequence that are no part of chunks; with offsets, -1: no chunks at all

    ggml_cuda_gdn_types types;
};

// The first tokens of a sequence of n that are read as chunks.
static __host__ __device__ __forceinline__ int ggml_cuda_gdn_n_chunked(const int n, const int n_last) {
    const int n_chunked = n_last < 0 ? 0 : n - (n_last < n ? n_last : n);
    return n_chunked >= GGML_CUDA_GDN_CHUNKED_MIN_TOKENS ? n_chunked : 0;
}

bool ggml_cuda_gated_delta_net_chunked_supported(const ggml_cuda_gdn_args & args, int cc);

// The first n_tokens of each sequence, with offsets those of ggml_cuda_gdn_n_chunked(). The states after them go to args.state, which may hold the initial states.
void ggml_cuda_gated_delta_net_chunked(ggml_backend_cuda_context & ctx, const ggml_cuda_gdn_args & args, int64_t n_tokens, cudaStream_t stream);
