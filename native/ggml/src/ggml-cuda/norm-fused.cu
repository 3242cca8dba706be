#include "norm-fused.cuh"
#include "norm-fused-device.cuh"

// A block has one row, a thread its elements 4*tid + 4*blockDim.x*i.
template <int n_vec, bool gated>
static __global__ void add_rms_norm_f32(const float * a, const float * b, const float * x, const float * gate, const float * w, float * sum,
        float * y, const ggml_cuda_columns_out columns, const int ncols, const float eps) {
    ggml_cuda_pdl_lc();
    const int64_t    row  = (int64_t) blockIdx.x * ncols;
    const int        lane = threadIdx.x % WARP_SIZE;
    const int        warp = threadIdx.x / WARP_SIZE;
    __shared__ float partial[32];

    float4 v[n_vec];
    float  squares = 0.0f;

    ggml_cuda_pdl_sync();
    const float g = gated ? 1.0f / (1.0f + expf(-gate[blockIdx.x])) : 0.0f;
#pragma unroll
    for (int i = 0; i < n_vec; ++i) {
        const int col = 4 * (threadIdx.x + i * blockDim.x);
        if (col < ncols) {
            float4 va = *(const float4 *) (a + row + col);
            if constexpr (gated) {
                const float4 vx = *(const float4 *) (x + row + col);
                va              = make_float4(va.x + g * vx.x, va.y + g * vx.y, va.z + g * vx.z, va.w + g * vx.w);
            }
            const float4 vb = *(const float4 *) (b + row + col);
            v[i]            = make_float4(va.x + vb.x, va.y + vb.y, va.z + vb.z, va.w + vb.w);
            squares += sum_of_squares(v[i]);
        }
    }

    squares = warp_reduce_sum(squares);
    if (lane == 0) { partial[warp] = squares; }
    __syncthreads();
    squares           = lane < (int) blockDim.x / WARP_SIZE ? partial[lane] : 0.0f;
    squares           = warp_reduce_sum(squares);
    const float scale = rsqrtf(squares / ncols + eps);

#pragma unroll
    for (int i = 0; i < n_vec; ++i) {
        const int col = 4 * (threadIdx.x + i * blockDim.x);
        if (col < ncols) {
            const float4 vw               = *(const float4 *) (w + col);
            *(float4 *) (sum + row + col) = v[i];
            v[i]                          = make_float4(scale * v[i].x * vw.x, scale * v[i].y * vw.y, scale * v[i].z * vw.z, scale * v[i].w * vw.w);
            if (y != nullptr) { *(float4 *) (y + row + col) = v[i]; }
            store_columns(columns, (row + col) / 4, v[i]);
        }
    }
}

// As add_rms_norm_f32 without anything to add. Weights are requested beside the row.
template <int n_vec>
static __global__ void rms_norm_columns_f32(
        const float * x, const float * w, float * y, const ggml_cuda_columns_out columns, const int ncols, const float eps) {
    ggml_cuda_pdl_lc();
    const int64_t    row  = (int64_t) blockIdx.x * ncols;
    const int        lane = threadIdx.x % WARP_SIZE;
    const int        warp = threadIdx.x / WARP_SIZE;
    __shared__ float partial[32];

    float4 v[n_vec];
    float4 vw[n_vec];
    float  squares = 0.0f;

    ggml_cuda_pdl_sync();
#pragma unroll
    for (int i = 0; i < n_vec; ++i) {
        const int col = 4 * (threadIdx.x + i * blockDim.x);
        if (col < ncols) {
            v[i]  = *(const float4 *) (x + row + col);
            vw[i] = *(const float4 *) (w + col);
            squares += sum_of_squares(v[i]);
        }
    }

    squares = warp_reduce_sum(squares);
    if (lane == 0) { partial[warp] = squares; }
    __syncthreads();
    squares           = lane < (int) blockDim.x / WARP_SIZE ? partial[lane] : 0.0f;
    squares           = warp_reduce_sum(squares);
    const float scale = rsqrtf(squares / ncols + eps);

#pragma unroll
    for (int i = 0; i < n_vec; ++i) {
        const int col = 4 * (threadIdx.x + i * blockDim.x);
        if (col < ncols) {
            v[i] = make_float4(scale * v[i].x * vw[i].x, scale * v[i].y * vw[i].y, scale * v[i].z * vw[i].z, scale * v[i].w * vw[i].w);
            if (y != nullptr) { *(float4 *) (y + row + col) = v[i]; }
            store_columns(columns, (row + col) / 4, v[i]);
        }
    }
}

// A warp has one row of 4*WARP_SIZE*n_vec elements.
template <int n_vec>
static __global__ void rms_norm_gated_f32(
        const float * x, const float * w, const float * z, float * y, const ggml_cuda_columns_out columns, const int64_t nrows, const float eps) {
    ggml_cuda_pdl_lc();
    constexpr int ncols = 4 * WARP_SIZE * n_vec;
    const int64_t row   = (int64_t) blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= nrows) { return; }
    float4 v[n_vec];
    float  squares = 0.0f;

    ggml_cuda_pdl_sync();
#pragma unroll
    for (int i = 0; i < n_vec; ++i) {
        v[i] = *(const float4 *) (x + row * ncols + 4 * (threadIdx.x + i * WARP_SIZE));
        squares += sum_of_squares(v[i]);
    }
    const float scale = rsqrtf(warp_reduce_sum(squares) / ncols + eps);

#pragma unroll
    for (int i = 0; i < n_vec; ++i) {
        const int    col = 4 * (threadIdx.x + i * WARP_SIZE);
        const float4 vw  = *(const float4 *) (w + col);
        const float4 vz  = *(const float4 *) (z + row * ncols + col);
        v[i]             = norm_gated(v[i], scale, vw, vz);
        if (y != nullptr) { *(float4 *) (y + row * ncols + col) = v[i]; }
        store_columns(columns, (row * ncols + col) / 4, v[i]);
    }
}

// A warp has one row of 4*WARP_SIZE*n_vec elements of one of the two; the rows of x have strides, those of y follow each other.
template <int n_vec>
static __global__ void rms_norm_scale_pair_f32(const float * x0, const float * x1, float * y0, float * y1, const uint3 ne1, const uint3 ne2,
        const int64_t s1, const int64_t s2, const int64_t s3, const uint32_t nrows, const float eps, const float factor) {
    ggml_cuda_pdl_lc();
    constexpr int  ncols = 4 * WARP_SIZE * n_vec;
    const uint32_t row   = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= nrows) { return; }
    const uint2   r21 = fast_div_modulo(row, ne1);
    const uint2   r32 = fast_div_modulo(r21.x, ne2);
    const float * x   = (blockIdx.y == 0 ? x0 : x1) + r32.x * s3 + r32.y * s2 + r21.y * s1;
    float *       y   = (blockIdx.y == 0 ? y0 : y1) + (int64_t) row * ncols;
    float4        v[n_vec];
    float         squares = 0.0f;

    ggml_cuda_pdl_sync();
#pragma unroll
    for (int i = 0; i < n_vec; ++i) {
        v[i] = *(const float4 *) (x + 4 * (threadIdx.x + i * WARP_SIZE));
        squares += sum_of_squares(v[i]);
    }
    const float scale = rsqrtf(warp_reduce_sum(squares) / ncols + eps);

#pragma unroll
    for (int i = 0; i < n_vec; ++i) {
        v[i] = make_float4(factor * (scale * v[i].x), factor * (scale * v[i].y), factor * (scale * v[i].z), factor * (scale * v[i].w));
        *(float4 *) (y + 4 * (threadIdx.x + i * WARP_SIZE)) = v[i];
    }
}

static __global__ void delta_net_gates_f32(
        const float * b, const float * a, const float * bias, const float * c, float * beta, float * g, const uint3 nheads, const int n) {
    ggml_cuda_pdl_lc();
    const int i = blockDim.x * blockIdx.x + threadIdx.x;
    if (i >= n) { return; }
    const uint32_t head = fastmodulo(i, nheads);
    ggml_cuda_pdl_sync();
    const float vb = b[i];
    const float va = a[i];
    beta[i]        = delta_net_beta(vb);
    g[i]           = delta_net_gate(va, bias[head], c[head]);
}

// y = x*sigmoid(gate), or x*silu(gate). The rows of gate have a stride.
template <bool is_silu>
static __global__ void gate_f32(const float4 * gate, const float4 * x, float4 * y, const ggml_cuda_columns_out columns, const uint3 gate_ne0,
        const int64_t gate_s1, const uint32_t n) {
    ggml_cuda_pdl_lc();
    const uint32_t i = blockDim.x * blockIdx.x + threadIdx.x;
    if (i >= n) { return; }
    const uint2 row = fast_div_modulo(i, gate_ne0);
    ggml_cuda_pdl_sync();
    const float4 g = gate[row.x * gate_s1 + row.y];
    float4       v = x[i];
    v.x *= (is_silu ? g.x : 1.0f) / (1.0f + expf(-g.x));
    v.y *= (is_silu ? g.y : 1.0f) / (1.0f + expf(-g.y));
    v.z *= (is_silu ? g.z : 1.0f) / (1.0f + expf(-g.z));
    v.w *= (is_silu ? g.w : 1.0f) / (1.0f + expf(-g.w));
    if (y != nullptr) { y[i] = v; }
    store_columns(columns, i, v);
}

// y = silu(gate)*up, 8 elements a thread. A gate that is beyond FP16 is its lowest value: silu(-inf) would be no number.
static __global__ void swiglu_f16(const uint4 * gate, const uint4 * up, uint4 * y, const int64_t n) {
    ggml_cuda_pdl_lc();
    const int64_t i = (int64_t) blockDim.x * blockIdx.x + threadIdx.x;
    if (i >= n) { return; }
    ggml_cuda_pdl_sync();
    const uint4 vg = gate[i];
    const uint4 vu = up[i];
    uint4       vy;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float2 g     = __half22float2(((const half2 *) &vg)[j]);
        const float2 u     = __half22float2(((const half2 *) &vu)[j]);
        ((half2 *) &vy)[j] = __floats2half2_rn(silu(fmaxf(g.x, -65504.0f)) * u.x, silu(fmaxf(g.y, -65504.0f)) * u.y);
    }
    y[i] = vy;
}

// Where a kernel writes y beside the columns of the product behind it.
static float * data_unless_columns_only(const ggml_tensor * y, const ggml_cuda_columns_out columns) {
    return columns.only ? nullptr : (float *) y->data;
}

// Whether a kernel that reads and writes row by row, each thread the same elements, may write y where x is.
static bool same_or_apart(const ggml_tensor * x, const ggml_tensor * y) {
    const char * x_data = (const char *) x->data;
    const char * y_data = (const char *) y->data;
    return (x_data == y_data && ggml_are_same_shape(x, y)) || x_data + ggml_nbytes(x) <= y_data || y_data + ggml_nbytes(y) <= x_data;
}

static bool aligned(std::initializer_list<const ggml_tensor *> tensors) {
    for (const ggml_tensor * tensor : tensors) {
        if (tensor->type != GGML_TYPE_F32 || (uintptr_t) tensor->data % sizeof(float4) != 0) { return false; }
    }
    return true;
}

static const ggml_tensor * other_source(const ggml_tensor * node, const ggml_tensor * known) {
    return node->src[0] == known ? node->src[1] : node->src[0];
}

static float norm_eps(const ggml_tensor * norm) {
    float eps;
    memcpy(&eps, norm->op_params, sizeof(float));
    return eps;
}

bool ggml_cuda_can_add_rms_norm(const ggml_tensor * add, const ggml_tensor * norm, const ggml_tensor * mul) {
    const ggml_tensor * a     = add->src[0];
    const ggml_tensor * b     = add->src[1];
    const ggml_tensor * w     = other_source(mul, norm);
    const int64_t       ncols = add->ne[0];
    return norm->src[0] == add && aligned({ a, b, w, add, mul }) && ggml_are_same_shape(a, b) && ggml_is_contiguous(a) && ggml_is_contiguous(b) &&
           ggml_is_contiguous(add) && ggml_is_contiguous(mul) && ggml_nelements(w) == ncols && ggml_is_contiguous(w) && ncols % 4 == 0 &&
           ncols <= 4 * 4 * 1024 && same_or_apart(a, add) && same_or_apart(b, add) && (const char *) add->data != (const char *) mul->data &&
           same_or_apart(add, mul);
}

// What is added is free behind the sum, so that y may lie where other rows of it are: then it is read from a copy. Operators one by one
//     would add up the squares in another order, and where y lies depends on the graph.
static const float * data_apart(
        ggml_backend_cuda_context & ctx, const ggml_tensor * x, const ggml_tensor * mul, const float * y, ggml_cuda_pool_alloc<float> & copy) {
    if (y == nullptr || same_or_apart(x, mul)) { return (const float *) x->data; }
    copy.alloc(ggml_nelements(x));
    CUDA_CHECK(cudaMemcpyAsync(copy.get(), x->data, ggml_nbytes(x), cudaMemcpyDeviceToDevice, ctx.stream()));
    return copy.get();
}

template <bool gated>
static void launch_add_rms_norm(ggml_backend_cuda_context & ctx, const ggml_tensor * a, const ggml_tensor * b, const ggml_tensor * x,
        const ggml_tensor * gate, ggml_tensor * add, const ggml_tensor * norm, ggml_tensor * mul, const ggml_cuda_columns_out columns) {
    const int                            ncols = add->ne[0];
    const int                            n_vec = (ncols / 4 + 1023) / 1024;
    const int                            block = GGML_PAD((ncols / 4 + n_vec - 1) / n_vec, WARP_SIZE);
    const ggml_cuda_kernel_launch_params params(dim3(ggml_nrows(add)), dim3(block), 0, ctx.stream());
    float *                              sum = (float *) add->data;
    float *                              y   = data_unless_columns_only(mul, columns);
    ggml_cuda_pool_alloc<float>          copy_a(ctx.pool());
    ggml_cuda_pool_alloc<float>          copy_b(ctx.pool());
    const float *                        a_d = data_apart(ctx, a, mul, y, copy_a);
    const float *                        b_d = data_apart(ctx, b, mul, y, copy_b);
    const float *                        x_d = gated ? (const float *) x->data : nullptr;
    const float *                        g_d = gated ? (const float *) gate->data : nullptr;
    const float *                        w   = (const float *) other_source(mul, norm)->data;
    switch (n_vec) {
        case 1:
            ggml_cuda_kernel_launch(add_rms_norm_f32<1, gated>, params, a_d, b_d, x_d, g_d, w, sum, y, columns, ncols, norm_eps(norm));
            break;
        case 2:
            ggml_cuda_kernel_launch(add_rms_norm_f32<2, gated>, params, a_d, b_d, x_d, g_d, w, sum, y, columns, ncols, norm_eps(norm));
            break;
        default:
            ggml_cuda_kernel_launch(add_rms_norm_f32<4, gated>, params, a_d, b_d, x_d, g_d, w, sum, y, columns, ncols, norm_eps(norm));
            break;
    }
}

void ggml_cuda_op_add_rms_norm(
        ggml_backend_cuda_context & ctx, ggml_tensor * add, const ggml_tensor * norm, ggml_tensor * mul, ggml_cuda_columns_out columns) {
    launch_add_rms_norm<false>(ctx, add->src[0], add->src[1], nullptr, nullptr, add, norm, mul, columns);
}

bool ggml_cuda_can_gated_add_rms_norm(const ggml_tensor * sigmoid, const ggml_tensor * gated, const ggml_tensor * sum, const ggml_tensor * add,
        const ggml_tensor * norm, const ggml_tensor * mul) {
    const ggml_tensor * gate  = sigmoid->src[0];
    const ggml_tensor * x     = other_source(gated, sigmoid);
    const ggml_tensor * a     = other_source(sum, gated);
    const ggml_tensor * b     = other_source(add, sum);
    const ggml_tensor * w     = other_source(mul, norm);
    const int64_t       ncols = add->ne[0];
    for (const ggml_tensor * in : { a, b, x }) {
        if (!ggml_are_same_shape(in, add) || !ggml_is_contiguous(in) || !same_or_apart(in, add) || !same_or_apart(in, mul)) { return false; }
    }
    return norm->src[0] == add && aligned({ a, b, x, w, add, mul }) && gate->type == GGML_TYPE_F32 && ggml_is_contiguous(gate) && gate->ne[0] == 1 &&
           ggml_nelements(gate) == ggml_nrows(add) && ggml_are_same_shape(sigmoid, gate) && ggml_are_same_shape(gated, x) &&
           ggml_is_contiguous(add) && ggml_is_contiguous(mul) && ggml_nelements(w) == ncols && ggml_is_contiguous(w) && ncols % 4 == 0 &&
           ncols <= 4 * 4 * 1024 && same_or_apart(gate, add) && same_or_apart(gate, mul) && (const char *) add->data != (const char *) mul->data &&
           same_or_apart(add, mul);
}

void ggml_cuda_op_gated_add_rms_norm(ggml_backend_cuda_context & ctx, const ggml_tensor * sigmoid, const ggml_tensor * gated, const ggml_tensor * sum,
        ggml_tensor * add, const ggml_tensor * norm, ggml_tensor * mul, ggml_cuda_columns_out columns) {
    launch_add_rms_norm<true>(
            ctx, other_source(sum, gated), other_source(add, sum), other_source(gated, sigmoid), sigmoid->src[0], add, norm, mul, columns);
}

bool ggml_cuda_can_rms_norm_columns(const ggml_tensor * norm, const ggml_tensor * mul) {
    const ggml_tensor * x     = norm->src[0];
    const ggml_tensor * w     = other_source(mul, norm);
    const int64_t       ncols = x->ne[0];
    return aligned({ x, w, mul }) && ggml_is_contiguous(x) && ggml_is_contiguous(mul) && ggml_are_same_shape(x, mul) && same_or_apart(x, mul) &&
           ggml_nelements(w) == ncols && ggml_is_contiguous(w) && ncols % 4 == 0 && ncols <= 4 * 4 * 1024;
}

void ggml_cuda_op_rms_norm_columns(ggml_backend_cuda_context & ctx, const ggml_tensor * norm, ggml_tensor * mul, ggml_cuda_columns_out columns) {
    const int                            ncols = mul->ne[0];
    const int                            n_vec = (ncols / 4 + 1023) / 1024;
    const int                            block = GGML_PAD((ncols / 4 + n_vec - 1) / n_vec, WARP_SIZE);
    const ggml_cuda_kernel_launch_params params(dim3(ggml_nrows(mul)), dim3(block), 0, ctx.stream());
    const float *                        x = (const float *) norm->src[0]->data;
    const float *                        w = (const float *) other_source(mul, norm)->data;
    float *                              y = data_unless_columns_only(mul, columns);
    switch (n_vec) {
        case 1:
            ggml_cuda_kernel_launch(rms_norm_columns_f32<1>, params, x, w, y, columns, ncols, norm_eps(norm));
            break;
        case 2:
            ggml_cuda_kernel_launch(rms_norm_columns_f32<2>, params, x, w, y, columns, ncols, norm_eps(norm));
            break;
        default:
            ggml_cuda_kernel_launch(rms_norm_columns_f32<4>, params, x, w, y, columns, ncols, norm_eps(norm));
            break;
    }
}

bool ggml_cuda_can_rms_norm_gated(const ggml_tensor * norm, const ggml_tensor * mul, const ggml_tensor * silu, const ggml_tensor * gated) {
    const ggml_tensor * x = norm->src[0];
    const ggml_tensor * w = other_source(mul, norm);
    const ggml_tensor * z = silu->src[0];
    return aligned({ x, w, z, gated }) && (x->ne[0] == 4 * WARP_SIZE || x->ne[0] == 8 * WARP_SIZE) && ggml_nelements(w) == x->ne[0] &&
           ggml_is_contiguous(w) && ggml_are_same_shape(x, z) && ggml_are_same_shape(x, gated) && ggml_is_contiguous(x) && ggml_is_contiguous(z) &&
           ggml_is_contiguous(gated) && same_or_apart(x, gated) && same_or_apart(z, gated);
}

void ggml_cuda_op_rms_norm_gated(ggml_backend_cuda_context & ctx, const ggml_tensor * norm, const ggml_tensor * mul, const ggml_tensor * silu,
        ggml_tensor * gated, ggml_cuda_columns_out columns) {
    const float *                        x     = (const float *) norm->src[0]->data;
    const float *                        w     = (const float *) other_source(mul, norm)->data;
    const float *                        z     = (const float *) silu->src[0]->data;
    float *                              y     = data_unless_columns_only(gated, columns);
    const int64_t                        nrows = ggml_nrows(gated);
    const ggml_cuda_kernel_launch_params params(dim3((nrows + 7) / 8), dim3(WARP_SIZE, 8), 0, ctx.stream());
    if (gated->ne[0] == 4 * WARP_SIZE) {
        ggml_cuda_kernel_launch(rms_norm_gated_f32<1>, params, x, w, z, y, columns, nrows, norm_eps(norm));
    } else {
        ggml_cuda_kernel_launch(rms_norm_gated_f32<2>, params, x, w, z, y, columns, nrows, norm_eps(norm));
    }
}

bool ggml_cuda_can_rms_norm_scale_pair(const ggml_tensor * norm0, const ggml_tensor * scale0, const ggml_tensor * norm1, const ggml_tensor * scale1) {
    const ggml_tensor * x0 = norm0->src[0];
    const ggml_tensor * x1 = norm1->src[0];
    return norm1 != norm0 && aligned({ x0, x1, scale0, scale1 }) && ggml_are_same_shape(x0, x1) && ggml_are_same_stride(x0, x1) &&
           (x0->ne[0] == 4 * WARP_SIZE || x0->ne[0] == 8 * WARP_SIZE) && x0->nb[0] == sizeof(float) && x0->nb[1] % sizeof(float4) == 0 &&
           x0->nb[2] % sizeof(float4) == 0 && x0->nb[3] % sizeof(float4) == 0 && ggml_nrows(x0) < INT32_MAX && ggml_is_contiguous(scale0) &&
           ggml_is_contiguous(scale1) && norm_eps(norm0) == norm_eps(norm1) &&
           ggml_get_op_params_f32(scale0, 0) == ggml_get_op_params_f32(scale1, 0) && ggml_get_op_params_f32(scale0, 1) == 0.0f &&
           ggml_get_op_params_f32(scale1, 1) == 0.0f &&
           // rows of x are read in an order of their own
           x0->data != scale0->data && x1->data != scale0->data && x0->data != scale1->data && x1->data != scale1->data &&
           same_or_apart(x0, scale0) && same_or_apart(x0, scale1) && same_or_apart(x1, scale0) && same_or_apart(x1, scale1) &&
           scale0->data != scale1->data && same_or_apart(scale0, scale1);
}

void ggml_cuda_op_rms_norm_scale_pair(
        ggml_backend_cuda_context & ctx, const ggml_tensor * norm0, ggml_tensor * scale0, const ggml_tensor * norm1, ggml_tensor * scale1) {
    const ggml_tensor *                  x0    = norm0->src[0];
    const uint32_t                       nrows = ggml_nrows(x0);
    const ggml_cuda_kernel_launch_params params(dim3((nrows + 7) / 8, 2), dim3(WARP_SIZE, 8), 0, ctx.stream());
    const auto                           launch = [&](auto kernel) {
        ggml_cuda_kernel_launch(kernel, params, (const float *) x0->data, (const float *) norm1->src[0]->data, (float *) scale0->data,
                (float *) scale1->data, init_fastdiv_values(x0->ne[1]), init_fastdiv_values(x0->ne[2]), (int64_t) (x0->nb[1] / sizeof(float)),
                (int64_t) (x0->nb[2] / sizeof(float)), (int64_t) (x0->nb[3] / sizeof(float)), nrows, norm_eps(norm0),
                ggml_get_op_params_f32(scale0, 0));
    };
    if (x0->ne[0] == 4 * WARP_SIZE) {
        launch(rms_norm_scale_pair_f32<1>);
    } else {
        launch(rms_norm_scale_pair_f32<2>);
    }
}

bool ggml_cuda_can_delta_net_gates(const ggml_tensor * sigmoid, const ggml_tensor * add, const ggml_tensor * softplus, const ggml_tensor * mul) {
    const ggml_tensor * b      = sigmoid->src[0];
    const ggml_tensor * a      = add->src[0];
    const ggml_tensor * bias   = add->src[1];
    const ggml_tensor * c      = other_source(mul, softplus);
    const int64_t       nheads = a->ne[0];
    return aligned({ b, a, bias, c, sigmoid, mul }) && ggml_nelements(b) == ggml_nelements(a) && ggml_nelements(a) < INT32_MAX &&
           ggml_nelements(bias) == nheads && ggml_nelements(c) == nheads && ggml_are_same_shape(a, mul) && ggml_is_contiguous(b) &&
           ggml_is_contiguous(a) && ggml_is_contiguous(bias) && ggml_is_contiguous(c) && ggml_is_contiguous(sigmoid) && ggml_is_contiguous(mul) &&
           // shapes differ, elements do not
           (b->data == sigmoid->data || same_or_apart(b, sigmoid)) && (a->data == sigmoid->data || same_or_apart(a, sigmoid)) &&
           (b->data == mul->data || same_or_apart(b, mul)) && (a->data == mul->data || same_or_apart(a, mul)) && sigmoid->data != mul->data &&
           same_or_apart(sigmoid, mul);
}

void ggml_cuda_op_delta_net_gates(
        ggml_backend_cuda_context & ctx, ggml_tensor * sigmoid, const ggml_tensor * add, const ggml_tensor * softplus, ggml_tensor * mul) {
    const int                            n = ggml_nelements(mul);
    const ggml_cuda_kernel_launch_params params(dim3((n + 255) / 256), dim3(256), 0, ctx.stream());
    ggml_cuda_kernel_launch(delta_net_gates_f32, params, (const float *) sigmoid->src[0]->data, (const float *) add->src[0]->data,
            (const float *) add->src[1]->data, (const float *) other_source(mul, softplus)->data, (float *) sigmoid->data, (float *) mul->data,
            init_fastdiv_values(add->ne[0]), n);
}

template <bool is_silu>
static void gate_f32_cuda(
        ggml_backend_cuda_context & ctx, const ggml_tensor * gate, const ggml_tensor * x, ggml_tensor * y, ggml_cuda_columns_out columns) {
    const int64_t                        n = ggml_nelements(y) / 4;
    const ggml_cuda_kernel_launch_params params(dim3((n + 255) / 256), dim3(256), 0, ctx.stream());
    ggml_cuda_kernel_launch(gate_f32<is_silu>, params, (const float4 *) gate->data, (const float4 *) x->data,
            (float4 *) data_unless_columns_only(y, columns), columns, init_fastdiv_values(gate->ne[0] / 4), (int64_t) (gate->nb[1] / sizeof(float4)),
            (uint32_t) n);
}

static bool can_gate(const ggml_tensor * gate, const ggml_tensor * x, const ggml_tensor * y) {
    // all rows of gate have one stride; where there are gaps between them, they are not where y is
    const bool rows       = gate->nb[0] == sizeof(float) && gate->ne[0] % 4 == 0 && gate->nb[1] % sizeof(float4) == 0 &&
                            gate->nb[2] == gate->ne[1] * gate->nb[1] && gate->nb[3] == gate->ne[2] * gate->nb[2];
    const bool gate_apart = ggml_is_contiguous(gate) && ggml_are_same_shape(gate, x) ?
                                    same_or_apart(gate, y) :
                                    (const char *) gate->data != (const char *) y->data && same_or_apart(gate, y);
    return aligned({ gate, x, y }) && rows && gate_apart && ggml_nelements(gate) == ggml_nelements(x) && ggml_nelements(x) < INT32_MAX &&
           ggml_are_same_shape(x, y) && ggml_is_contiguous(x) && ggml_is_contiguous(y) && same_or_apart(x, y);
}

bool ggml_cuda_can_swiglu_columns(const ggml_tensor * glu) {
    return ggml_get_glu_op(glu) == GGML_GLU_OP_SWIGLU && glu->src[1] != nullptr && can_gate(glu->src[0], glu->src[1], glu);
}

void ggml_cuda_op_swiglu_columns(ggml_backend_cuda_context & ctx, ggml_tensor * glu, ggml_cuda_columns_out columns) {
    gate_f32_cuda<true>(ctx, glu->src[0], glu->src[1], glu, columns);
}

void ggml_cuda_op_swiglu_f16(ggml_backend_cuda_context & ctx, const half * gate, const half * up, int64_t n, ggml_cuda_columns_out columns) {
    const ggml_cuda_kernel_launch_params params(dim3((n / 8 + 255) / 256), dim3(256), 0, ctx.stream());
    ggml_cuda_kernel_launch(swiglu_f16, params, (const uint4 *) gate, (const uint4 *) up, (uint4 *) columns.data, n / 8);
}

bool ggml_cuda_can_sigmoid_mul_columns(const ggml_tensor * gate, const ggml_tensor * sigmoid, const ggml_tensor * mul) {
    return can_gate(gate, other_source(mul, sigmoid), mul);
}

void ggml_cuda_op_sigmoid_mul_columns(
        ggml_backend_cuda_context & ctx, const ggml_tensor * gate, const ggml_tensor * sigmoid, ggml_tensor * mul, ggml_cuda_columns_out columns) {
    gate_f32_cuda<false>(ctx, gate, other_source(mul, sigmoid), mul, columns);
}
