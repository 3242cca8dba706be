#pragma once

#include "common.cuh"

// Copies of rows into shared memory by Hopper's copy engine (cp.async.bulk): addresses and sizes are multiples of 16 bytes. A barrier counts
//     arrivals and bytes. Barriers and destinations are addresses in shared memory.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER

static __device__ __forceinline__ void bulk_barrier_init(const uint32_t barrier, const int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// behind the initialization of all barriers
static __device__ __forceinline__ void bulk_barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// arrives, and nbytes are to come
static __device__ __forceinline__ void bulk_barrier_expect(const uint32_t barrier, const int nbytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(nbytes) : "memory");
}

static __device__ __forceinline__ void bulk_barrier_arrive(const uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void bulk_barrier_wait(const uint32_t barrier, const int parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra end;\n"
                 "bra again;\n"
                 "end:\n"
                 "}\n" ::"r"(barrier),
            "r"(parity)
            : "memory");
}

// for what is read once
static __device__ __forceinline__ uint64_t bulk_policy_evict_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// for what others are about to read as well, beside much that is read once
static __device__ __forceinline__ uint64_t bulk_policy_evict_normal() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

static __device__ __forceinline__ void bulk_copy(
        const uint32_t dst, const void * src, const int nbytes, const uint32_t barrier, const uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst), "l"(src),
            "r"(nbytes), "r"(barrier), "l"(policy)
            : "memory");
}

#endif // defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
