#pragma once

#include "common.cuh"

#ifdef GGML_CUDA_USE_PDL
// ggml_cuda_kernel_launch for a kernel of Hopper's whose blocks are in clusters
template <typename... Params, typename... Args>
static void ggml_cuda_kernel_launch_clusters(
        void (*kernel)(Params...), const ggml_cuda_kernel_launch_params & params, const dim3 & cluster, Args... args) {
    static const char * env_c = getenv("GGML_CUDA_PDL");
    static const bool   pdl   = env_c == nullptr || std::atoi(env_c) != 0;

    ggml_cuda_pdl_config config(params);
    cudaLaunchAttribute  attrs[2] = {};
    attrs[0].id                   = cudaLaunchAttributeClusterDimension;
    attrs[0].val.clusterDim.x     = cluster.x;
    attrs[0].val.clusterDim.y     = cluster.y;
    attrs[0].val.clusterDim.z     = cluster.z;
    attrs[1]                      = config.attr;
    config.cfg.attrs              = attrs;
    config.cfg.numAttrs           = pdl ? 2 : 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config.cfg, kernel, Params(args)...));
}
#endif // GGML_CUDA_USE_PDL
