// Time of a product by type, shape and number of columns, as a decoding model sees it: matrices are read from memory,
// not from a cache (as many of them in turn as fill 512 MiB), and each product quantizes its columns.
//
//     c++ -O2 -std=c++17 -IGGML/include mul-mat-speed.cpp -o mul-mat-speed -LBIN -lggml -lggml-base
//     ./mul-mat-speed LABEL TYPE,... COLUMNS,... [ROWSxLENGTH,...]
//
// One line of JSON each. Which kernel runs is chosen by the environment (see patches/README.md).

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <sstream>
#include <string>
#include <vector>

static std::vector<std::string> split(const std::string & text) {
    std::vector<std::string> parts;
    std::stringstream        stream(text);
    for (std::string part; std::getline(stream, part, ',');) {
        parts.push_back(part);
    }
    return parts;
}

int main(int argc, char ** argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: %s LABEL TYPE,... COLUMNS,... [ROWSxLENGTH,...]\n", argv[0]);
        return 1;
    }
    // of Qwen3.5-4B: gate and up, down, in_proj_qkv, in_proj_z, ssm_out, wq, wk
    const auto shapes = split(argc > 4 ? argv[4] : "9216x2560,2560x9216,8192x2560,4096x2560,2560x4096,1024x2560");

    ggml_backend_load_all();
    ggml_backend_t backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_GPU, nullptr);
    if (!backend) {
        fprintf(stderr, "no GPU\n");
        return 1;
    }

    std::vector<uint8_t> noise(64 << 20);
    std::mt19937         random(0);
    for (size_t i = 0; i < noise.size(); i += 4) {
        *(uint32_t *) &noise[i] = random() & 0x3fff3fff; // no half in it is huge or not a number
    }

    for (const auto & name : split(argv[2])) {
        ggml_type type = GGML_TYPE_COUNT;
        for (int i = 0; i < GGML_TYPE_COUNT; i++) {
            if (ggml_type_name((ggml_type) i) && name == ggml_type_name((ggml_type) i)) {
                type = (ggml_type) i;
            }
        }
        if (type == GGML_TYPE_COUNT) {
            fprintf(stderr, "no type %s\n", name.c_str());
            return 1;
        }
        for (const auto & shape : shapes) {
            const int64_t rows = std::stoll(shape), length = std::stoll(shape.substr(shape.find('x') + 1));
            const size_t  size  = ggml_row_size(type, length) * rows;
            const int     count = (int) std::max<size_t>(1, (size_t(512) << 20) / size);
            for (const auto & columns : split(argv[3])) {
                const int64_t    n      = std::stoll(columns);
                ggml_init_params params = { ggml_tensor_overhead() * (2 * count + 8) + ggml_graph_overhead_custom(2 * count + 8, false),
                                            nullptr, true };
                ggml_context *   ctx    = ggml_init(params);
                ggml_tensor *    x      = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, length, n);
                ggml_cgraph *    graph  = ggml_new_graph_custom(ctx, 2 * count + 8, false);
                std::vector<ggml_tensor *> weights;
                for (int i = 0; i < count; i++) {
                    weights.push_back(ggml_new_tensor_2d(ctx, type, length, rows));
                    ggml_build_forward_expand(graph, ggml_mul_mat(ctx, weights.back(), x));
                }
                ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
                if (!buffer) {
                    fprintf(stderr, "no memory for %d matrices of %s\n", count, shape.c_str());
                    return 1;
                }
                std::vector<float> values(length * n);
                std::normal_distribution<float> normal;
                for (float & value : values) {
                    value = normal(random);
                }
                ggml_backend_tensor_set(x, values.data(), 0, values.size() * sizeof(float));
                for (ggml_tensor * w : weights) {
                    for (size_t at = 0; at < size; at += noise.size()) {
                        ggml_backend_tensor_set(w, noise.data(), at, std::min(noise.size(), size - at));
                    }
                }
                for (int i = 0; i < 3; i++) { // the CUDA graph is captured
                    ggml_backend_graph_compute(backend, graph);
                }
                std::vector<double> times;
                for (int i = 0; i < 7; i++) {
                    const int64_t start = ggml_time_us();
                    ggml_backend_graph_compute(backend, graph);
                    times.push_back(double(ggml_time_us() - start) / count);
                }
                std::sort(times.begin(), times.end());
                printf("{\"label\": \"%s\", \"type\": \"%s\", \"rows\": %lld, \"length\": %lld, \"columns\": %lld, \"us\": %.2f, \"GB/s\": %.0f}\n",
                       argv[1], name.c_str(), (long long) rows, (long long) length, (long long) n, times[3], size / times[3] / 1e3);
                fflush(stdout);
                ggml_backend_buffer_free(buffer);
                ggml_free(ctx);
            }
        }
    }
    ggml_backend_free(backend);
}
