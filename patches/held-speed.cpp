// Time of a step of some sequences beside cells that others hold in the same (unified) pool.
//
//     c++ -O2 -std=c++17 -ILLAMA/include -IGGML/include held-speed.cpp -o held-speed -LBIN -lllama -lggml -lggml-base
//     ./held-speed LABEL MODEL.gguf HELD,... SEQUENCES,... [STEPS]
//
// One line of JSON each: the median step, without sampling, of sequences of 512 tokens, and the greedy token with its logit
// after the last one, for the first and the last sequence: tokens are the same in each run, so that builds can be compared.

#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

static std::vector<int> numbers(const std::string & text) {
    std::vector<int>  result;
    std::stringstream stream(text);
    for (std::string part; std::getline(stream, part, ',');) {
        result.push_back(std::stoi(part));
    }
    return result;
}

static double now_ms() {
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

int main(int argc, char ** argv) {
    if (argc < 5) {
        fprintf(stderr, "usage: %s LABEL MODEL.gguf HELD,... SEQUENCES,... [STEPS]\n", argv[0]);
        return 1;
    }
    const auto held = numbers(argv[3]), sequences = numbers(argv[4]);
    const int  steps = argc > 5 ? std::stoi(argv[5]) : 40, prompt = 512, piece = 8192;
    const int  most = *std::max_element(sequences.begin(), sequences.end()), pool = *std::max_element(held.begin(), held.end());
    const int  holders = pool / piece + 1;

    llama_log_set([](ggml_log_level level, const char * text, void *) { if (level >= GGML_LOG_LEVEL_ERROR) { fputs(text, stderr); } }, nullptr);
    ggml_backend_load_all();
    llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers = 999;
    llama_model * model = llama_model_load_from_file(argv[2], model_params);
    llama_context_params params = llama_context_default_params();
    params.n_ctx           = pool + most * (prompt + steps) + 1024;
    params.n_batch         = piece;
    params.n_ubatch        = 2048;
    params.n_seq_max       = most + holders;
    params.kv_unified      = true;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    llama_context * context = model ? llama_init_from_model(model, params) : nullptr;
    if (!context) {
        fprintf(stderr, "no context\n");
        return 1;
    }
    llama_memory_t memory  = llama_get_memory(context);
    const int      n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));

    llama_batch batch = llama_batch_init(piece, 0, 1);
    unsigned    seed  = 1;
    auto add = [&](int sequence, int position, bool output) {
        seed = seed * 1664525u + 1013904223u;
        batch.token[batch.n_tokens]     = (seed >> 8) % n_vocab;
        batch.pos[batch.n_tokens]       = position;
        batch.n_seq_id[batch.n_tokens]  = 1;
        batch.seq_id[batch.n_tokens][0] = sequence;
        batch.logits[batch.n_tokens++]  = output;
    };
    auto decode = [&] {
        if (llama_decode(context, batch)) {
            fprintf(stderr, "llama_decode failed\n");
            exit(1);
        }
        llama_synchronize(context);
        batch.n_tokens = 0;
    };

    for (int cells : held) {
        llama_memory_clear(memory, true);
        for (int at = 0; at < cells; at += piece) {
            for (int i = 0; i < std::min(piece, cells - at); i++) {
                add(most + at / piece, i, false);
            }
            decode();
        }
        for (int n : sequences) {
            for (int s = 0; s < most; s++) {
                llama_memory_seq_rm(memory, s, -1, -1);
            }
            for (int s = 0; s < n; s++) {
                for (int i = 0; i < prompt; i++) {
                    add(s, i, i == prompt - 1);
                }
                if (batch.n_tokens + prompt > piece || s == n - 1) {
                    decode();
                }
            }
            std::vector<double> times;
            for (int step = 0; step < steps; step++) {
                for (int s = 0; s < n; s++) {
                    add(s, prompt + step, true);
                }
                const double start = now_ms();
                decode();
                times.push_back(now_ms() - start);
            }
            std::sort(times.begin(), times.end());
            std::string top;
            for (int i : {0, n - 1}) {
                const float * logits = llama_get_logits_ith(context, i);
                const int     best   = std::max_element(logits, logits + n_vocab) - logits;
                char          text[64];
                snprintf(text, sizeof(text), "%s[%d, %.4f]", top.empty() ? "" : ", ", best, logits[best]);
                top += text;
            }
            printf("{\"label\": \"%s\", \"held\": %d, \"sequences\": %d, \"ms\": %.3f, \"ms_mean\": %.3f, \"top\": [%s]}\n", argv[1], cells, n,
                   times[steps / 2], [&] { double sum = 0; for (double t : times) { sum += t; } return sum / steps; }(), top.c_str());
            fflush(stdout);
        }
    }
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
}
