// Samples random rows on a device and on the host, by requests of every kind: all results must be the same.
//
//     test-row-sampler [DEVICE]     (default: CUDA0)

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "llama-row-state.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>

static const int N = 248320, REAL = 248077, ROWS = LLAMA_ROW_MOST;

struct kind {
    const char *         name;
    std::vector<uint8_t> ops;
    int                  top_k = 0;
    double               top_p = 1, typical = 1, min_p = 0, xtc = 0, sigma = 0, temperature = 1;
    float                repetition = 1, presence = 0, frequency = 0;
    int                  last_n = -2, bias = 0, ban = 0, n_top = -1;
    int                  endless = 0; // tokens whose bias is infinite, every other one's below 0
    int                  mask    = 0; // one of so many tokens may be chosen
    bool                 scored = false, within = false;
    int                  min_keep = 0;
    double               mu = 10, range = 0, exponent = 1;
};

static std::mt19937_64 rng(7);

static llama_row_params params_of(const kind & k) {
    const auto       part = [](double x) { return (uint32_t) std::min(x * 4294967296.0, 4294967295.0); };
    llama_row_params p    = {};
    p.seed                = rng();
    p.top_k               = k.top_k;
    p.top_p               = part(k.top_p);
    p.typical             = part(k.typical);
    p.min_p               = k.min_p > 0 ? (uint32_t) (-std::log2(k.min_p) * (1 << LRS_Q)) : LRS_FAR;
    p.xtc                 = (uint64_t) (k.xtc * 4294967296.0);
    p.xtc_least           = part(0.1);
    p.n_sigma             = k.sigma;
    p.scale               = (float) (LRS_LOG2_E / k.temperature);
    p.min_keep            = k.min_keep;
    p.temp_low            = (float) std::max(0.0, k.temperature - k.range);
    p.temp_range          = (float) (k.temperature + k.range) - p.temp_low;
    p.exponent            = (uint32_t) (k.exponent * 65536);
    p.mu                  = (int32_t) (k.mu * (1 << LRS_Q));
    std::copy(k.ops.begin(), k.ops.end(), p.ops);
    return p;
}

// Samplers and requests for rows [ROWS][N]: all of one kind, or `mixed`, most of them greedy.
struct batch {
    std::vector<llama_row_sampler>     samplers;
    std::vector<std::vector<uint32_t>> masks;
    std::vector<llama_row_ask>         asks;
    llama_row_requests                 requests;

    batch(const kind & special, const std::vector<float> & logits, bool mixed) : samplers(ROWS), masks(ROWS) {
        const kind greedy = { "greedy", { LLAMA_ROW_OP_BEST } };
        for (int r = 0; r < ROWS; r++) {
            const kind &        k   = mixed && r % 8 ? greedy : special;
            const float *       row = logits.data() + (size_t) r * N;
            llama_row_sampler & s   = samplers[r];
            s.params                = params_of(k);
            s.n_real                = REAL;
            // the best tokens are among those seen
            std::vector<int32_t> best(REAL);
            for (int i = 0; i < REAL; i++) { best[i] = i; }
            std::partial_sort(best.begin(), best.begin() + 300, best.end(), [&](int a, int b) { return row[a] > row[b]; });
            if (k.repetition != 1 || k.presence != 0) {
                s.penalties.push_back({ k.repetition, k.presence, k.frequency, true, k.last_n, {} });
                for (int i = 0; i < 100; i++) { s.of(best[rng() % 300]).in_prompt[0] = true; }
            }
            if (k.within) { s.penalties.push_back({ 1.5f, 0, 0, true, -2, {} }); }
            for (int i = 0; i < 300; i++) { s.accept(i % 3 ? rng() % REAL : best[rng() % 300]); }
            for (int i = 0; i < k.bias; i++) { s.of(k.bias == REAL ? i : rng() % REAL).add += (rng() % 2001 - 1000.0f) / 100; }
            for (int i = 0; i < k.endless; i++) { s.of(best[rng() % 300]).add += i % 2 ? -INFINITY : INFINITY; }
            for (int i = 0; i < k.ban; i++) { s.of(best[rng() % 300]).banned_until = LLAMA_ROW_ALWAYS; }
            if (k.mask) {
                masks[r].assign((N + 31) / 32, 0);
                for (int i = 0; i < N; i++) { masks[r][i / 32] |= (uint32_t) (rng() % k.mask == 0) << (i % 32); }
            }
            const int32_t scored = k.scored ? rng() % REAL : -1;
            asks.push_back({ &s, k.mask ? masks[r].data() : nullptr, (int32_t) masks[r].size(), r, k.n_top, scored, -1 });
        }
        requests.fill(asks.data(), ROWS, N);
    }
};

static std::vector<kind> kinds() {
    enum : uint8_t {
        SIGMA   = LLAMA_ROW_OP_TOP_N_SIGMA,
        K       = LLAMA_ROW_OP_TOP_K,
        T       = LLAMA_ROW_OP_TEMPERATURE,
        TYPICAL = LLAMA_ROW_OP_TYPICAL,
        P       = LLAMA_ROW_OP_TOP_P,
        MIN     = LLAMA_ROW_OP_MIN_P,
        XTC     = LLAMA_ROW_OP_XTC,
        BEST    = LLAMA_ROW_OP_BEST,
        DYNAMIC = LLAMA_ROW_OP_DYNATEMP,
        MIRO    = LLAMA_ROW_OP_MIROSTAT,
        MIRO_2  = LLAMA_ROW_OP_MIROSTAT_V2
    };
    std::vector<kind> all;
    const auto        add = [&](const char * name, std::vector<uint8_t> ops, auto set) {
        kind k;
        k.name = name;
        k.ops  = ops;
        set(k);
        all.push_back(k);
    };
    const auto card = [](kind & k) { k.top_k = 20, k.top_p = 0.8, k.temperature = 0.7, k.presence = 1.5; };
    add("greedy", { BEST }, [](kind &) {});
    add("greedy, 20 log-probabilities", { BEST }, [](kind & k) { k.n_top = 20; });
    add("greedy, one log-probability", { BEST }, [](kind & k) { k.n_top = 0; });
    add("unchecked", { BEST }, [](kind & k) { k.n_top = LLAMA_ROW_UNCHECKED; });
    add("scored", { BEST }, [](kind & k) { k.n_top = 3, k.scored = true; });
    add("taken", { T }, [](kind & k) { k.scored = true; });
    add("one bias", { BEST }, [](kind & k) { k.bias = 1; });
    add("biases and bans", { BEST }, [](kind & k) { k.bias = 300, k.ban = 50; });
    add("a bias on every token", { BEST }, [](kind & k) { k.bias = REAL; });
    for (uint8_t op : { SIGMA, K, TYPICAL, P, MIN, XTC }) {
        add("an infinite bias", { T, op },
                [](kind & k) { k.endless = 5, k.sigma = 1, k.top_k = 9, k.typical = k.top_p = 0.9, k.min_p = 0.1, k.xtc = 1; });
        add("unchecked, filtered", { T, op },
                [](kind & k) { k.n_top = LLAMA_ROW_UNCHECKED, k.sigma = 1, k.top_k = 9, k.typical = k.top_p = 0.9, k.min_p = 0.1, k.xtc = 1; });
    }
    add("mask", { BEST }, [](kind & k) { k.mask = 3; });
    add("narrow mask", { BEST }, [](kind & k) { k.mask = 20000; });
    add("mask of nothing", { BEST }, [](kind & k) { k.mask = 1 << 30; });
    add("top_k, temperature, top_p", { K, T, P }, [](kind & k) { k.top_k = 20, k.top_p = 0.8, k.temperature = 0.7; });
    add("the card's", { K, T, P }, card);
    add("the card's, log-probabilities", { K, T, P }, [&](kind & k) { card(k), k.n_top = 20; });
    add("the card's, mask", { K, T, P }, [&](kind & k) { card(k), k.mask = 5; });
    add("the card's, narrow mask", { K, T, P }, [&](kind & k) { card(k), k.mask = 30000; });
    add("all penalties", { K, T, P }, [&](kind & k) { card(k), k.repetition = 1.3f, k.frequency = 0.3f, k.within = true; });
    add("a window", { T }, [&](kind & k) { k.repetition = 0.8f, k.presence = -1, k.last_n = 64; });
    add("temperature", { T }, [](kind &) {});
    add("cold", { T }, [](kind & k) { k.temperature = 1e-5; });
    add("hot", { T }, [](kind & k) { k.temperature = 50; });
    add("top_p", { T, P }, [](kind & k) { k.top_p = 0.95; });
    add("top_p, log-probabilities", { T, P }, [](kind & k) { k.top_p = 0.95, k.n_top = 5; });
    add("top_p, temperature", { P, T }, [](kind & k) { k.top_p = 0.2, k.temperature = 1.7; });
    add("min_p", { T, MIN }, [](kind & k) { k.min_p = 0.05, k.temperature = 0.8; });
    add("top_p, min_p", { P, MIN }, [](kind & k) { k.min_p = 0.05, k.top_p = 0.9; });
    add("typical", { TYPICAL }, [](kind & k) { k.typical = 0.9; });
    add("top_k, typical", { K, TYPICAL }, [](kind & k) { k.typical = 0.9, k.top_k = 50; });
    add("typical, top_p, min_p", { TYPICAL, P, MIN }, [](kind & k) { k.typical = 0.3, k.top_p = 0.5, k.min_p = 0.3; });
    add("top-n-sigma", { SIGMA }, [](kind & k) { k.sigma = 1; });
    add("top-n-sigma, top_p", { SIGMA, P }, [](kind & k) { k.sigma = 2, k.top_p = 0.7; });
    add("XTC", { XTC }, [](kind & k) { k.xtc = 1; });
    add("top_k, XTC at times", { K, XTC }, [](kind & k) { k.xtc = 0.5, k.top_k = 100; });
    const auto everything = [](kind & k) {
        k.sigma = 3, k.top_k = 200, k.temperature = 1.2, k.typical = 0.95, k.top_p = 0.9, k.min_p = 0.01, k.xtc = 0.7;
        k.presence = 0.5, k.repetition = 1.1f, k.bias = 20, k.ban = 5, k.mask = 4, k.n_top = 20;
    };
    add("everything", { SIGMA, K, T, TYPICAL, P, MIN, XTC }, everything);
    add("another order", { T, P, TYPICAL, MIN, XTC, K, SIGMA }, everything);
    for (double exponent : { 0.0, 0.7, 100.0 }) {
        add("dynamic temperature", { DYNAMIC }, [&](kind & k) { k.range = 0.5, k.exponent = exponent; });
        add("top_k, dynamic temperature", { K, DYNAMIC, P },
                [&](kind & k) { k.range = 5, k.exponent = exponent, k.top_k = 1 + (int) exponent, k.top_p = 0.9; });
    }
    for (int n : { 2, 40, 1025, 300000 }) {
        add("min_keep", { P }, [&](kind & k) { k.top_p = 0.3, k.min_keep = n; });
        add("min_keep", { MIN }, [&](kind & k) { k.min_p = 0.5, k.min_keep = n; });
        add("min_keep", { TYPICAL }, [&](kind & k) { k.typical = 0.2, k.min_keep = n; });
        add("min_keep", { K, XTC }, [&](kind & k) { k.xtc = 1, k.top_k = 5, k.min_keep = n; });
        add("min_keep", { XTC }, [&](kind & k) { k.xtc = 1, k.min_keep = n; });
        add("everything, min_keep", { SIGMA, K, DYNAMIC, TYPICAL, P, MIN, XTC }, [&](kind & k) { everything(k), k.range = 0.5, k.min_keep = n; });
    }
    for (double mu : { -3.0, 3.0, 60.0 }) {
        for (uint8_t op : { MIRO, MIRO_2 }) {
            add("mirostat", { op }, [&](kind & k) { k.mu = mu; });
            add("cold mirostat, log-probabilities", { T, op }, [&](kind & k) { k.mu = mu, k.temperature = 0.6, k.n_top = 20; });
            add("mirostat, edits, mask", { T, op }, [&](kind & k) { k.mu = mu, k.temperature = 1.5, k.presence = 1, k.bias = 20, k.mask = 4; });
            add("mirostat, narrow mask", { DYNAMIC, op }, [&](kind & k) { k.mu = mu, k.range = 1, k.mask = 30000, k.n_top = 3; });
        }
    }
    for (int top_k : { 1000, 1024, 1025, 100000 }) {
        add("many", { K, P }, [&](kind & k) { k.top_k = top_k, k.top_p = 0.9; });
    }
    return all;
}

static std::vector<float> random_rows(bool broken) {
    std::vector<float> set((size_t) ROWS * N);
    for (int r = 0; r < ROWS; r++) {
        float *                         l = set.data() + (size_t) r * N;
        std::normal_distribution<float> normal(0, r % 8 == 0 ? 0.01f : 3.0f);
        for (int i = 0; i < N; i++) { l[i] = normal(rng); }
        for (int i = 0; r % 8 == 1 && i < 20; i++) { l[rng() % N] = 25 - i; }
        for (int i = 0; r % 8 == 2 && i < N; i++) { l[i] = std::round(l[i] * 4) / 4; }
        for (int i = 0; r % 8 == 3 && i < N; i++) { l[i] = std::round(l[i] * 4096) / 4096 + 20; }
    }
    if (!broken) { return set; }
    for (int i = 0; i < N; i++) {
        set[5 * N + i] = 0;
        set[6 * N + i] = -3.5f;
        set[7 * N + i] = i == 77 ? 1e-3f : 0;
    }
    set[13 * N + 200000] = INFINITY;
    set[14 * N + 5]      = NAN;
    set[15 * N + 248319] = -INFINITY;
    return set;
}

static bool same(const llama_row_result & a, const llama_row_result & b, bool scored) {
    if (a.status != b.status || a.token != b.token || a.surprise != b.surprise) { return false; }
    if (!scored || a.status) { return true; }
    const bool row = a.rank == b.rank && a.n_top == b.n_top && a.logit == b.logit && a.best == b.best && a.mass == b.mass;
    return row && !memcmp(a.top, b.top, a.n_top * 4) && !memcmp(a.top_logits, b.top_logits, a.n_top * 4);
}

int main(int argc, char ** argv) {
    ggml_backend_load_all();
    ggml_backend_dev_t dev = ggml_backend_dev_by_name(argc > 1 ? argv[1] : "CUDA0");
    auto run = dev ? (llama_row_launch_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), "ggml_backend_cuda_sample_rows") :
                     nullptr;
    if (!run) {
        printf("no device that samples\n");
        return 1;
    }
    ggml_backend_ptr           backend(ggml_backend_dev_init(dev, nullptr));
    ggml_backend_buffer_type_t host = ggml_backend_dev_host_buffer_type(dev), buft = ggml_backend_dev_buffer_type(dev);
    ggml_context_ptr           ctx(ggml_init({ 2 * ggml_tensor_overhead(), nullptr, true }));
    ggml_tensor *              rows   = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, N, ROWS);
    ggml_tensor *              tokens = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 2 * ROWS);
    ggml_backend_buffer_ptr    memory(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
    const size_t               most = (size_t) ROWS * (REAL + 1000) * sizeof(llama_row_edit) + (1 << 22);
    ggml_backend_buffer_ptr    pinned(ggml_backend_buft_alloc_buffer(host, most)), device(ggml_backend_buft_alloc_buffer(buft, most));
    ggml_backend_buffer_ptr    scratch(ggml_backend_buft_alloc_buffer(buft, LLAMA_ROW_SCRATCH));
    ggml_backend_buffer_ptr    out(ggml_backend_buft_alloc_buffer(host, ROWS * sizeof(llama_row_result)));
    ggml_backend_buffer_clear(scratch.get(), 0);

    int                  wrong = 0, compared = 0;
    std::vector<int32_t> all(ROWS), chosen(ROWS), asked(ROWS);
    for (int i = 0; i < ROWS; i++) { all[i] = i; }
    for (int turn = 0; turn < 3; turn++) {
        const std::vector<float> logits = random_rows(turn == 0);
        ggml_backend_tensor_set(rows, logits.data(), 0, logits.size() * 4);
        std::vector<const float *> each;
        for (int r = 0; r < ROWS; r++) { each.push_back(logits.data() + (size_t) r * N); }
        for (const kind & k : kinds()) {
            batch                         made(k, logits, turn == 2);
            std::vector<llama_row_result> right(ROWS);
            llama_rows_on_host(made.requests.rows.data(), each.data(), right.data(), ROWS, N, REAL, 16);
            for (int n : { 1, 8, ROWS }) {
                llama_row_launch launch;
                launch.logits   = (float *) rows->data;
                launch.n_rows   = n;
                launch.n_vocab  = N;
                launch.n_real   = REAL;
                launch.which    = all.data();
                launch.from     = ggml_backend_buffer_get_base(pinned.get());
                launch.to       = ggml_backend_buffer_get_base(device.get());
                launch.upload   = made.requests.bytes();
                launch.requests = (const llama_row_request *) launch.to;
                launch.results  = (llama_row_result *) ggml_backend_buffer_get_base(out.get());
                launch.tokens   = (int32_t *) tokens->data;
                launch.asked    = launch.tokens + ROWS;
                launch.scratch  = ggml_backend_buffer_get_base(scratch.get());
                made.requests.copy((char *) launch.from, (char *) launch.to);
                memset(launch.results, 0xee, ROWS * sizeof(llama_row_result));
                if (!run(backend.get(), &launch)) {
                    printf("refused\n");
                    return 1;
                }
                run(backend.get(), nullptr);
                ggml_backend_tensor_get(tokens, chosen.data(), 0, n * 4);
                ggml_backend_tensor_get(tokens, asked.data(), ROWS * 4, n * 4);
                for (int r = 0; r < n; r++) {
                    compared++;
                    const llama_row_result &a = launch.results[r], &b = right[r];
                    if ((!same(a, b, made.asks[r].n_top >= 0) || chosen[r] != std::max(0, b.token) || asked[r] != chosen[r]) && wrong++ < 40) {
                        printf("WRONG %s, %d rows, row %d: status %d %d, token %d %d %d, rank %d %d, top %d %d\n", k.name, n, r, a.status, b.status,
                                a.token, b.token, chosen[r], a.rank, b.rank, a.top[0], b.top[0]);
                    }
                }
            }
        }
        std::vector<float> back(logits.size());
        ggml_backend_tensor_get(rows, back.data(), 0, back.size() * 4);
        if (memcmp(back.data(), logits.data(), back.size() * 4) != 0) {
            printf("WRONG: logits were changed\n");
            wrong++;
        }
    }
    printf("%s: %d rows compared, %d wrong\n", ggml_backend_dev_description(dev), compared, wrong);
    return wrong != 0;
}
