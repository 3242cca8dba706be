// The sampler of llama-row-sampler.h as one launch for all rows of a pass.
//
// Several blocks share a row. Between the passes of a row its blocks meet at a barrier of their own, so all blocks
// of a launch must be resident at once (cudaLaunchCooperativeKernel). Sums are integers, so their order is free.
#include "row-sampler.cuh"

#include <mutex>
#include <unordered_map>

#if defined(GGML_USE_HIP) || defined(GGML_USE_MUSA)

extern "C" bool ggml_backend_cuda_sample_rows(ggml_backend_t, const llama_row_launch *) { return false; }

#else

#define RS_THREADS 1024
#define RS_LIST    1024 // tokens that one block handles alone, one a thread
#define RS_BINS    2048
#define RS_WORDS   40
#define RS_LISTS   8

struct alignas(16) row_pair {
    uint64_t key, weight;
};

// Between launches all of this is 0.
struct row_scratch {
    uint32_t barrier, ended, n_list[RS_LISTS];
    uint64_t words[RS_WORDS]; // sums and maxima, each for one use
    uint32_t low[3][RS_BINS], high[3][RS_BINS], count[3][RS_BINS];
    row_pair list[RS_LISTS][RS_LIST];
};

struct row_shared {
    uint32_t low[RS_BINS], high[RS_BINS], count[RS_BINS];
    row_pair list[RS_LIST];
    uint64_t warp[32];
    uint64_t result[4];
    uint32_t n;
};

enum { RS_KEY, RS_FAR, RS_TYPICAL };

struct row_sampler {
    row_shared &              s;
    row_scratch &             g;
    const float *             logits;
    const llama_row_request & q;
    int                       n_vocab, n_real, n_blocks, block;
    uint32_t                  meetings = 0;
    int                       hists = 0, words = 0, lists = 0;
    // the tokens that are left
    bool     listed    = false; // those of s.list alone; then one block works alone
    uint32_t n         = 0;
    uint64_t floor_key = 0, ceil_key = UINT64_MAX;
    uint64_t typical_least = 0; // of typical keys, at typical_best and typical_scale
    uint32_t typical_mean  = 0;
    float    typical_best = 0, typical_scale = 0;
    float    best = 0, scale = LRS_LOG2_E;
    bool     raw      = false; // for log-probabilities: no mask
    int32_t  surprise = 0;

    __device__ row_sampler(row_shared & s, row_scratch & g, const float * logits, const llama_row_request & q, int n_vocab, int n_real) :
        s(s), g(g), logits(logits), q(q), n_vocab(n_vocab), n_real(n_real), n_blocks(gridDim.x), block(blockIdx.x) {}

    __device__ void meet() {
        __syncthreads();
        if (listed || n_blocks == 1) { return; }
        meetings++;
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(&g.barrier, 1);
            while (*(volatile uint32_t *) &g.barrier < meetings * n_blocks) { __nanosleep(20); }
            __threadfence();
        }
        __syncthreads();
    }

    // --- sums and maxima over the tokens

    template <typename Join>
    __device__ uint64_t in_block(uint64_t value, Join join) {
        for (int i = 16; i; i >>= 1) { value = join(value, (uint64_t) __shfl_xor_sync(0xffffffffu, (unsigned long long) value, i)); }
        __syncthreads();
        if (threadIdx.x % 32 == 0) { s.warp[threadIdx.x / 32] = value; }
        __syncthreads();
        value = s.warp[threadIdx.x % 32];
        for (int i = 16; i; i >>= 1) { value = join(value, (uint64_t) __shfl_xor_sync(0xffffffffu, (unsigned long long) value, i)); }
        return value;
    }

    __device__ uint64_t word(int i) const { return __ldcg((const unsigned long long *) &g.words[i]); }

    // adds a block's share; after meet() it is word(i)
    __device__ void add_up(int i, uint64_t value) {
        value = in_block(value, [](uint64_t a, uint64_t b) { return a + b; });
        if (threadIdx.x == 0 && value) { atomicAdd((unsigned long long *) &g.words[i], (unsigned long long) value); }
    }

    __device__ void maximum(int i, uint64_t value) {
        value = in_block(value, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
        if (threadIdx.x == 0 && value) { atomicMax((unsigned long long *) &g.words[i], (unsigned long long) value); }
    }

    // Calls f(i, the logits 4 i to 4 i + 3) for this block's part of the row.
    template <typename F>
    __device__ void stream(int quads, F f) const {
        const int stride = n_blocks * RS_THREADS;
        int       i      = block * RS_THREADS + threadIdx.x;
        for (; i + stride < quads; i += 2 * stride) { // two loads under way
            const float4 a = ((const float4 *) logits)[i], b = ((const float4 *) logits)[i + stride];
            f(i, a);
            f(i + stride, b);
        }
        if (i < quads) { f(i, ((const float4 *) logits)[i]); }
    }

    // Calls f(id, logit) for each token that is left.
    template <typename F>
    __device__ void each(F f) const {
        if (listed) {
            if (threadIdx.x < n) {
                const uint64_t key = s.list[threadIdx.x].key;
                if (kept(key)) { f(lrs_key_id(key), lrs_logit(key >> 32)); }
            }
            return;
        }
        stream((n_real + 3) / 4, [&](int i, float4 four) {
            const float    values[4] = { four.x, four.y, four.z, four.w };
            const uint32_t bits      = raw || !q.mask ? 15u : q.mask[i / 8] >> (i % 8 * 4);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t id    = 4 * i + j;
                const uint32_t order = lrs_order(values[j]);
                if ((bits >> j & 1) && (int) id < n_real && order > 0x007fffffu && kept(lrs_key(order, id))) { f(id, values[j]); }
            }
        });
    }

    __device__ bool kept(uint64_t key) const {
        if (key < floor_key || key > ceil_key) { return false; }
        if (!typical_least) { return true; }
        const uint32_t far = lrs_distance(lrs_logit(key >> 32), typical_best, typical_scale);
        return lrs_key(lrs_typical_order(far, typical_mean), lrs_key_id(key)) >= typical_least;
    }

    __device__ uint32_t distance(float logit) const { return lrs_distance(logit, best, scale); }

    // --- selecting

    __device__ void clear_hist() {
        for (int i = threadIdx.x; i < RS_BINS; i += RS_THREADS) { s.low[i] = s.high[i] = s.count[i] = 0; }
        __syncthreads();
    }

    // weight 0: tokens alone are counted
    __device__ void count_in(uint32_t bin, uint64_t weight) {
        atomicAdd(&s.count[bin], 1);
        if (!weight) { return; }
        const uint32_t low = (uint32_t) weight, old = atomicAdd(&s.low[bin], low);
        const uint32_t high = (uint32_t) (weight >> 32) + (old + low < old);
        if (high) { atomicAdd(&s.high[bin], high); }
    }

    // Adds up the blocks' histograms.
    __device__ void merge_hist() {
        __syncthreads();
        if (listed || n_blocks == 1) { return; }
        const int slot = hists++ % 3;
        for (int i = threadIdx.x; i < RS_BINS; i += RS_THREADS) {
            if (s.count[i]) {
                const uint32_t low = s.low[i], old = atomicAdd(&g.low[slot][i], low);
                const uint32_t high = s.high[i] + (old + low < old);
                if (high) { atomicAdd(&g.high[slot][i], high); }
                atomicAdd(&g.count[slot][i], s.count[i]);
            }
        }
        meet();
        // what was added up two merges ago has been read by all blocks: it is used again after the next meeting
        const int old = (slot + 2) % 3;
        for (int i = threadIdx.x; i < RS_BINS; i += RS_THREADS) {
            s.low[i]   = __ldcg(&g.low[slot][i]);
            s.high[i]  = __ldcg(&g.high[slot][i]);
            s.count[i] = __ldcg(&g.count[slot][i]);
            if (block == 0) { g.low[old][i] = g.high[old][i] = g.count[old][i] = 0; }
        }
        __syncthreads();
    }

    __device__ uint64_t weight_of(int bin) const { return (uint64_t) s.high[bin] << 32 | s.low[bin]; }

    __device__ uint64_t total() {
        uint64_t mine = 0;
        for (int i = threadIdx.x; i < RS_BINS; i += RS_THREADS) { mine += weight_of(i); }
        return in_block(mine, [](uint64_t a, uint64_t b) { return a + b; });
    }

    // The first bin at which the bins before it and its own weigh `need`. Subtracts those before it from `need`.
    __device__ uint32_t reach(uint64_t & need, uint32_t & before) {
        // two bins a thread
        const uint64_t a = weight_of(2 * threadIdx.x), b = weight_of(2 * threadIdx.x + 1);
        const uint32_t m = s.count[2 * threadIdx.x], k = s.count[2 * threadIdx.x + 1];
        uint64_t       sum = a + b, counts = m + k;
        const int      lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        for (int i = 1; i < 32; i <<= 1) {
            const uint64_t x = __shfl_up_sync(0xffffffffu, (unsigned long long) sum, i);
            const uint64_t y = __shfl_up_sync(0xffffffffu, (unsigned long long) counts, i);
            if (lane >= i) {
                sum += x;
                counts += y;
            }
        }
        __syncthreads();
        if (lane == 31) {
            s.warp[warp]     = sum;
            s.list[warp].key = counts;
        }
        __syncthreads();
        for (int i = 0; i < warp; i++) {
            sum += s.warp[i];
            counts += s.list[i].key;
        }
        const uint64_t start = sum - a - b;
        if (start < need && sum >= need) {
            const bool second = start + a < need;
            s.result[0]       = 2 * threadIdx.x + second;
            s.result[1]       = need - start - (second ? a : 0);
            s.result[2]       = counts - m - k + (second ? m : 0);
        }
        __syncthreads();
        const uint32_t bin = s.result[0];
        need               = s.result[1];
        before             = s.result[2];
        __syncthreads();
        return bin;
    }

    __device__ void append(uint64_t key, uint64_t weight, int list) {
        // threads of a warp may come here apart; each takes a place of its own
        g.list[list][atomicAdd(&g.n_list[list], 1)] = { key, weight };
    }

    // The lowest key of those in s.list [m] whose better ones weigh less than `need`.
    __device__ uint64_t settle(uint32_t m, uint64_t need) {
        __syncthreads();
        const uint64_t key    = threadIdx.x < m ? s.list[threadIdx.x].key : 0;
        uint64_t       before = 0;
        for (uint32_t i = 0; i < m; i++) { before += s.list[i].key > key ? s.list[i].weight : 0; }
        const uint64_t mine  = threadIdx.x < m && before < need ? key : UINT64_MAX;
        const uint64_t least = in_block(mine, [](uint64_t a, uint64_t b) { return a < b ? a : b; });
        __syncthreads();
        return least;
    }

    __device__ uint64_t key_of(int kind, uint32_t id, float logit) const {
        return kind == RS_TYPICAL ? lrs_key(lrs_typical_order(distance(logit), typical_mean), id) : lrs_key(lrs_order(logit), id);
    }

    // Digits of a token's place in the order, the most significant first; a smaller one is better.
    __device__ uint32_t digit(int kind, int level, uint32_t far, uint64_t key) const {
        if (kind != RS_KEY) {
            if (level == 0) { return far >> 19; }
            if (level == 1) { return far >> 8 & 2047; }
            level -= 2;
        }
        const uint32_t worse = ~(uint32_t) (key >> 32), id = lrs_key_id(key);
        switch (level) {
            case 0:
                return worse >> 21;
            case 1:
                return worse >> 10 & 2047;
            case 2:
                return (worse & 1023) << 1 | id >> 20;
            case 3:
                return id >> 9 & 2047;
            default:
                return id & 511;
        }
    }

    __device__ uint32_t far_of(int kind, float logit) const {
        if (kind == RS_KEY) { return 0; }
        const uint32_t far = distance(logit);
        return kind == RS_FAR ? far : ~lrs_typical_order(far, typical_mean);
    }

    // The lowest key of the best tokens that together weigh `need`, a number of tokens or, with `part`, that part of
    // all masses. With `gather` s.list then has all those kept, and the block works alone; other blocks return 0.
    __device__ uint64_t select(int kind, uint64_t need, uint32_t part, bool gather) {
        const bool masses = part != 0;
        uint32_t   digits[7], kept_before = 0, in_bin = 0;
        int        level = 0;
        if (!listed) {
            for (; level < 7; level++) {
                clear_hist();
                each([&](uint32_t id, float logit) {
                    const uint64_t key = key_of(kind, id, logit);
                    const uint32_t far = far_of(kind, logit);
                    for (int i = 0; i < level; i++) {
                        if (digit(kind, i, far, key) != digits[i]) { return; }
                    }
                    count_in(digit(kind, level, far, key), masses ? lrs_mass(distance(logit)) : 0);
                });
                merge_hist();
                if (!masses) {
                    for (int i = threadIdx.x; i < RS_BINS; i += RS_THREADS) { s.low[i] = s.count[i]; }
                    __syncthreads();
                }
                if (level == 0 && part) {
                    need = lrs_part(total(), part);
                } else if (level == 0) {
                    const uint64_t all = total();
                    need               = need < all ? need : all;
                }
                uint32_t       before;
                const uint32_t bin = reach(need, before);
                digits[level]      = bin;
                in_bin             = s.count[bin];
                kept_before += before;
                gather = gather && kept_before < RS_LIST; // more than a block can take: the row stays
                __syncthreads();
                if (in_bin + (gather ? kept_before : 0) <= RS_LIST) {
                    level++;
                    break;
                }
            }
        }
        if (listed) {
            // copied apart, since the list of what is left stays
            uint64_t key = 0, weight = 0;
            bool     mine = false;
            each([&](uint32_t id, float logit) {
                key    = key_of(kind, id, logit);
                weight = masses ? lrs_mass(distance(logit)) : 1;
                mine   = true;
            });
            const uint64_t all = in_block(weight, [](uint64_t a, uint64_t b) { return a + b; });
            need               = part ? lrs_part(all, part) : need < all ? need : all;
            const row_pair own = s.list[threadIdx.x];
            __syncthreads();
            s.list[threadIdx.x]  = mine ? row_pair{ key, weight } : row_pair{ 0, 0 };
            const uint64_t least = settle(n, need);
            s.list[threadIdx.x]  = own;
            __syncthreads();
            return least;
        }
        const int list = lists++;
        each([&](uint32_t id, float logit) {
            const uint64_t key = key_of(kind, id, logit);
            const uint32_t far = far_of(kind, logit);
            for (int i = 0; i < level; i++) {
                const uint32_t d = digit(kind, i, far, key);
                if (d < digits[i] && gather) { break; }
                if (d != digits[i]) { return; }
            }
            append(key, masses ? lrs_mass(distance(logit)) : 1, list);
        });
        meet();
        if (gather && block != 0) {
            listed = true;
            n      = 0;
            return 0;
        }
        const uint32_t m = __ldcg(&g.n_list[list]);
        if (threadIdx.x < m) {
            const ulonglong2 pair = __ldcg((const ulonglong2 *) &g.list[list][threadIdx.x]);
            s.list[threadIdx.x]   = { pair.x, pair.y };
        }
        if (gather) {
            listed = true;
            n      = m;
            // `need` counts from the bin on
            return settle(m, need + kept_before);
        }
        return settle(m, need);
    }

    // A number of tokens; one copy for what is rare.
    __device__ __noinline__ uint64_t select_best(int kind, uint64_t need, bool gather) { return select(kind, need, 0, gather); }

    // --- filters

    // The lowest key that is kept, if with each logit all higher ones are.
    template <typename Keep>
    __device__ uint64_t lowest_key(Keep keep) {
        uint32_t no = 0x007fffffu, yes = lrs_order(best); // -inf is not kept
        while (yes - no > 1) {
            const uint32_t middle = no + (yes - no) / 2;
            if (keep(lrs_logit(middle))) {
                yes = middle;
            } else {
                no = middle;
            }
        }
        return (uint64_t) yes << 32;
    }

    __device__ void keep_from(uint64_t key) { floor_key = key > floor_key ? key : floor_key; }

    // `least`, or less so that min_keep tokens are kept.
    __device__ uint64_t or_less(int kind, uint64_t least) {
        if (q.params.min_keep < 2) { return least; }
        const uint64_t other = select_best(kind, q.params.min_keep, false);
        return other < least ? other : least;
    }

    __device__ uint64_t joined_sum(uint64_t value) {
        if (listed || n_blocks == 1) {
            return in_block(value, [](uint64_t a, uint64_t b) { return a + b; });
        }
        const int i = words++;
        add_up(i, value);
        meet();
        return word(i);
    }

    __device__ uint64_t joined_max(uint64_t value) {
        if (listed || n_blocks == 1) {
            return in_block(value, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
        }
        const int i = words++;
        maximum(i, value);
        meet();
        return word(i);
    }

    __device__ void find_best() {
        uint64_t order = 0;
        each([&](uint32_t, float logit) { order = order > lrs_order(logit) ? order : lrs_order(logit); });
        best = lrs_logit((uint32_t) joined_max(order));
    }

    struct row_totals {
        uint64_t n, mass, moments;
    };

    // Of the tokens that are left.
    __device__ __noinline__ row_totals totals() {
        row_totals all = { 0, 0, 0 };
        each([&](uint32_t, float logit) {
            const uint32_t far  = distance(logit);
            const uint64_t mass = lrs_mass(far);
            all.n++;
            all.mass += mass;
            all.moments += lrs_moment(far, mass);
        });
        return { joined_sum(all.n), joined_sum(all.mass), joined_sum(all.moments) };
    }

    // Block 0 tells the others. Nothing is listed before or after it.
    __device__ uint32_t mirostat_k() {
        const uint64_t least = select_best(RS_KEY, LRS_MIROSTAT_M, true);
        const int      at    = words++;
        if (block == 0) {
            const uint64_t key  = threadIdx.x < n ? s.list[threadIdx.x].key : 0;
            uint32_t       rank = 0, n_best = 0;
            for (uint32_t i = 0; i < n; i++) {
                rank += s.list[i].key > key;
                n_best += s.list[i].key >= least;
            }
            __syncthreads();
            if (key >= least && key) { s.low[rank] = distance(lrs_logit(key >> 32)); }
            __syncthreads();
            if (threadIdx.x == 0) {
                uint64_t products = 0, squares = 0;
                for (uint32_t i = 0; i + 1 < n_best; i++) {
                    products += lrs_zipf_step(i) * (s.low[i + 1] - s.low[i]);
                    squares += lrs_zipf_step(i) * lrs_zipf_step(i);
                }
                g.words[at] = lrs_mirostat_k(q.params.mu, products, squares, n_vocab);
            }
        }
        listed = false;
        n      = 0;
        meet();
        return word(at);
    }

    __device__ void filter(int op) {
        const llama_row_params & p = q.params;
        if (op == LLAMA_ROW_OP_TOP_N_SIGMA) {
            uint64_t count = 0, sum = 0, squares = 0;
            each([&](uint32_t, float logit) {
                const uint64_t below = lrs_below(logit, best);
                count++;
                sum += below;
                squares += below * below;
            });
            count              = joined_sum(count);
            sum                = joined_sum(sum);
            squares            = joined_sum(squares);
            const uint32_t far = lrs_sigma(count, sum, squares, p.n_sigma);
            keep_from(lowest_key([&](float logit) { return lrs_below(logit, best) <= far; }));
        } else if (op == LLAMA_ROW_OP_TOP_K) {
            keep_from(select(RS_KEY, p.top_k, 0, true));
        } else if (op == LLAMA_ROW_OP_TEMPERATURE) {
            scale = p.scale;
        } else if (op == LLAMA_ROW_OP_DYNATEMP) {
            const row_totals all = totals();
            scale                = lrs_dynamic_scale(p, all.n, all.mass, all.moments, scale);
        } else if (op == LLAMA_ROW_OP_TYPICAL) {
            const row_totals all = totals();
            typical_mean         = lrs_mean_distance(all.moments, all.mass);
            const uint64_t least = or_less(RS_TYPICAL, select(RS_TYPICAL, 0, p.typical, false));
            typical_best         = best;
            typical_scale        = scale;
            typical_least        = least;
            find_best();
        } else if (op == LLAMA_ROW_OP_TOP_P) {
            keep_from(or_less(RS_KEY, select(RS_FAR, 0, p.top_p, false)));
        } else if (op == LLAMA_ROW_OP_MIN_P) {
            keep_from(or_less(RS_KEY, lowest_key([&](float logit) { return lrs_distance(logit, best, scale) <= p.min_p; })));
        } else if (op == LLAMA_ROW_OP_MIROSTAT) {
            keep_from(select_best(RS_KEY, mirostat_k(), true));
        } else if (op == LLAMA_ROW_OP_MIROSTAT_V2) {
            const uint32_t reach = lrs_mirostat_reach(p.mu, totals().mass);
            keep_from(lowest_key([&](float logit) { return lrs_distance(logit, best, scale) <= reach; }));
        } else if (op == LLAMA_ROW_OP_XTC) {
            if (lrs_random(lrs_row_seed(p.seed, q.position, LRS_STREAM_XTC), 0) >= p.xtc) { return; }
            const row_totals all   = totals();
            const uint64_t   least = lrs_part(all.mass, p.xtc_least);
            if (p.min_keep > 1) {
                uint64_t above = 0;
                each([&](uint32_t, float logit) { above += lrs_mass(distance(logit)) >= least; });
                if (all.n + 1 < joined_sum(above) + p.min_keep) { return; }
            }
            uint64_t worst = 0; // of ~key, so that 0 is none
            each([&](uint32_t id, float logit) {
                if (lrs_mass(distance(logit)) >= least) {
                    const uint64_t other = ~lrs_key(lrs_order(logit), id);
                    worst                = worst > other ? worst : other;
                }
            });
            worst = joined_max(worst);
            if (worst) { ceil_key = ~worst < ceil_key ? ~worst : ceil_key; }
            find_best();
        }
    }

    // The key of the token; all blocks get it. One with an infinite logit has all the mass.
    __device__ uint64_t choose() {
        bool greedy = lrs_unusable(best), mirostat = false;
        for (int i = 0; i < LLAMA_ROW_MAX_OPS && q.params.ops[i] && !greedy; i++) {
            greedy = q.params.ops[i] == LLAMA_ROW_OP_BEST;
            if (!greedy) { filter(q.params.ops[i]); }
            if (listed && block != 0) { return 0; }
            mirostat = mirostat || q.params.ops[i] == LLAMA_ROW_OP_MIROSTAT || q.params.ops[i] == LLAMA_ROW_OP_MIROSTAT_V2;
        }
        uint64_t       found = 0;
        const uint64_t seed  = lrs_row_seed(q.params.seed, q.position, LRS_STREAM_DRAW);
        s.n                  = 0; // the block's best score so far
        __syncthreads();
        each([&](uint32_t id, float logit) {
            if (greedy) {
                const uint64_t key = lrs_key(lrs_order(logit), id);
                found              = found > key ? found : key;
                return;
            }
            const uint32_t far = distance(logit), high = lrs_random(seed, id);
            if (far <= LRS_LAST && high <= lrs_high_bound(far, *(volatile uint32_t *) &s.n)) {
                const uint32_t score = lrs_score(far, (uint64_t) high << 32 | lrs_random_low(seed, id, high));
                const uint64_t key   = lrs_key(score, id);
                found                = found > key ? found : key;
                atomicMax(&s.n, score);
            }
        });
        found = joined_max(found);
        if (mirostat) {
            uint64_t mass = 0, order = 0; // of the token, whose logit another block may already put back
            each([&](uint32_t id, float logit) {
                mass += lrs_mass(distance(logit));
                if (id == lrs_key_id(found)) { order = lrs_order(logit); }
            });
            mass     = joined_sum(mass);
            order    = joined_max(order);
            surprise = lrs_surprise(mass) + (int32_t) distance(lrs_logit((uint32_t) order));
        }
        return found;
    }
};

struct row_map {
    int32_t request[LLAMA_ROW_MOST];
};

// grid: blocks a row, rows. `logits`: rows [n_vocab], n_vocab a multiple of 4. Rows are changed while the launch runs
// (edits) and are as before when it ends.
static __global__ void __launch_bounds__(RS_THREADS, 1) row_sample(float * logits, const llama_row_request * requests, const row_map map,
        row_scratch * scratch, llama_row_result * results, int32_t * tokens, int32_t * asked, int n_vocab, int n_real) {
    __shared__ row_shared s;
    const int             which = map.request[blockIdx.y];
    if (which < 0) { return; }
    const llama_row_request & q   = requests[which];
    row_scratch &             g   = scratch[blockIdx.y];
    llama_row_result &        out = results[which];
    float *                   row = logits + (size_t) blockIdx.y * n_vocab;
    row_sampler               sampler(s, g, row, q, n_vocab, n_real);
    const int                 quads = n_vocab / 4;

    // the row as it is: its best tokens, with padding and without, and whether it is usable
    uint64_t best = 0, highest = 0, flags = 0;
    sampler.stream(quads, [&](int i, float4 four) {
        const float values[4] = { four.x, four.y, four.z, four.w };
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t bits;
            memcpy(&bits, &values[j], 4);
            flags |= lrs_unusable(values[j]) ? 1 : 0;
            flags |= bits << 1 ? 2 : 0;
            const uint32_t order = lrs_order(values[j]);
            highest              = highest > order ? highest : order;
            const uint64_t key   = lrs_key(order, 4 * i + j);
            best                 = best > key || 4 * i + j >= n_real ? best : key;
        }
    });
    const bool plain      = !q.n_edits && !q.mask;
    const bool best_token = plain && q.params.ops[0] == LLAMA_ROW_OP_BEST && q.scored < 0;
    const bool quick      = q.n_top < 0 && (q.scored >= 0 || best_token);
    // 1 and 2 together are 3: a maximum of flags would lose one, so each has a word
    sampler.maximum(sampler.words, best);
    sampler.maximum(sampler.words + 1, flags & 1);
    sampler.maximum(sampler.words + 2, flags & 2);
    sampler.maximum(sampler.words + 3, highest);
    const int at = sampler.words;
    sampler.words += 4;
    uint64_t   token  = 0;
    int32_t    status = 0;
    const auto judge  = [&] {
        status = q.n_top == LLAMA_ROW_UNCHECKED ? LLAMA_ROW_OK :
                 sampler.word(at + 1)           ? LLAMA_ROW_NOT_FINITE :
                 !sampler.word(at + 2)          ? LLAMA_ROW_ZERO :
                                                  LLAMA_ROW_OK;
    };
    if (quick) {
        // the last block to come has all maxima
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            s.n = atomicAdd(&g.ended, 1) == gridDim.x - 1;
            __threadfence();
        }
        __syncthreads();
        if (!s.n) { return; }
        judge();
        token = q.scored >= 0 ? lrs_key(0, q.scored) : sampler.word(at);
        if (!status && q.scored < 0 && token >> 32 <= 0x007fffffu) { status = LLAMA_ROW_NONE_LEFT; }
    } else {
        sampler.meet();
        judge();
        const float likeliest = lrs_logit((uint32_t) sampler.word(at + 3));
        int32_t     n_top     = 0;
        if (q.n_top >= 0 && !status) {
            if (q.n_top > 0) {
                sampler.raw          = true;
                sampler.best         = likeliest;
                const int      most  = q.n_top < LLAMA_ROW_MAX_TOP ? q.n_top : LLAMA_ROW_MAX_TOP;
                const uint64_t least = sampler.select(RS_KEY, most, 0, true);
                if (blockIdx.x == 0 && threadIdx.x < sampler.n) {
                    const uint64_t key  = s.list[threadIdx.x].key;
                    uint32_t       rank = 0;
                    for (uint32_t i = 0; i < sampler.n; i++) { rank += s.list[i].key > key; }
                    if (key >= least && rank < LLAMA_ROW_MAX_TOP) {
                        out.top[rank]        = lrs_key_id(key);
                        out.top_logits[rank] = lrs_logit(key >> 32);
                    }
                }
                n_top          = most < n_real ? most : n_real;
                sampler.listed = sampler.raw = false;
                sampler.n                    = 0;
            }
        }
        // the edits of this block's part of the row; the model's logits wait in their place
        const bool edited = q.n_edits && !status && q.scored < 0;
        const auto edits  = [&](auto f) {
            for (int32_t e = threadIdx.x; e < q.n_edits; e += RS_THREADS) {
                llama_row_edit & edit = q.edits[e];
                if ((edit.token / 4 / RS_THREADS) % gridDim.x == blockIdx.x) { f(edit); }
            }
            __syncthreads();
        };
        if (edited) {
            edits([&](llama_row_edit & e) {
                const float logit = row[e.token];
                row[e.token]      = lrs_edited(e, q.repetition, logit);
                e.add             = logit;
            });
        }
        if (q.scored >= 0) {
            token = lrs_key(0, q.scored);
        } else if (!status) {
            if (plain) {
                sampler.best = lrs_logit(sampler.word(at) >> 32);
            } else {
                sampler.find_best();
            }
            if (lrs_order(sampler.best) <= 0x007fffffu) {
                status = LLAMA_ROW_NONE_LEFT;
            } else if (best_token) {
                token = sampler.word(at);
            } else {
                token = sampler.choose();
            }
        }
        if (edited) {
            __syncthreads();
            edits([&](llama_row_edit & e) { row[e.token] = e.add; });
        }
        // all blocks meet again, those that left the choice to block 0, too
        sampler.listed = false;
        if (q.n_top >= 0 && !status) {
            const int token_at = sampler.words++, rank_at = sampler.words++, mass_at = sampler.words++;
            if (blockIdx.x == 0 && threadIdx.x == 0) { g.words[token_at] = token; }
            sampler.meet();
            token                 = sampler.word(token_at);
            const uint32_t id     = lrs_key_id(token);
            const float    logit  = __ldcg(row + id);
            const uint64_t mine   = lrs_key(lrs_order(logit), id);
            uint64_t       better = 0, mass = 0;
            sampler.stream(quads, [&](int i, float4 four) {
                const float values[4] = { four.x, four.y, four.z, four.w };
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    better += 4 * i + j < n_real && lrs_key(lrs_order(values[j]), 4 * i + j) > mine;
                    mass += lrs_mass(lrs_distance(values[j], likeliest, LRS_LOG2_E));
                }
            });
            sampler.add_up(rank_at, better);
            sampler.add_up(mass_at, mass);
            sampler.meet();
            if (blockIdx.x == 0 && threadIdx.x == 0) {
                out.rank  = 1 + (int32_t) sampler.word(rank_at);
                out.logit = logit;
                out.mass  = sampler.word(mass_at);
                out.best  = likeliest;
                out.n_top = n_top;
            }
        }
        // block 0 clears the scratch when the others need it no more
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(&g.ended, 1);
        }
        if (blockIdx.x != 0) { return; }
        if (threadIdx.x == 0) {
            while (*(volatile uint32_t *) &g.ended < gridDim.x) { __nanosleep(20); }
            __threadfence();
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        const int32_t chosen = status ? -1 : (int32_t) lrs_key_id(token);
        out.status           = status;
        out.token            = chosen;
        // one that exists
        if (tokens) { tokens[blockIdx.y] = max(0, chosen); }
        if (asked) { asked[which] = max(0, chosen); }
        out.surprise = status ? 0 : sampler.surprise;
        g.barrier = g.ended = 0;
        for (int i = 0; i < RS_LISTS; i++) { g.n_list[i] = 0; }
    }
    if (threadIdx.x < RS_WORDS) { g.words[threadIdx.x] = 0; }
    if (!quick) {
        for (int i = threadIdx.x; i < 3 * RS_BINS; i += RS_THREADS) { (&g.low[0][0])[i] = (&g.high[0][0])[i] = (&g.count[0][0])[i] = 0; }
    }
}

#define RS_MOST_BLOCKS 64 // a row

static_assert(sizeof(row_scratch) * LLAMA_ROW_MOST <= LLAMA_ROW_SCRATCH, "no room for what the blocks of a row share");

// What is of one backend. Uploads have a stream of their own, so that they do not wait for the pass.
struct row_streams {
    cudaStream_t uploads  = nullptr;
    cudaEvent_t  uploaded = nullptr, sampled = nullptr;
};

static row_streams & streams_of(const ggml_backend_cuda_context & context) {
    static std::mutex                                                         mutex;
    static std::unordered_map<const ggml_backend_cuda_context *, row_streams> all;
    std::lock_guard<std::mutex>                                               lock(mutex);
    row_streams &                                                             found = all[&context];
    if (!found.uploads) {
        CUDA_CHECK(cudaStreamCreateWithFlags(&found.uploads, cudaStreamNonBlocking));
        CUDA_CHECK(cudaEventCreateWithFlags(&found.uploaded, cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&found.sampled, cudaEventDisableTiming));
    }
    return found;
}

extern "C" bool ggml_backend_cuda_sample_rows(ggml_backend_t backend, const llama_row_launch * launch) {
    ggml_backend_cuda_context & context = *(ggml_backend_cuda_context *) backend->context;
    ggml_cuda_set_device(context.device);
    row_streams & device = streams_of(context);
    if (!launch) {
        CUDA_CHECK(cudaEventSynchronize(device.sampled));
        return true;
    }
    const int n_sm = ggml_cuda_info().devices[context.device].nsm;
    if (launch->n_vocab % 4 || (uintptr_t) launch->logits % 16 || launch->n_rows < 1) { return false; }
    cudaStream_t stream = context.stream();
    if (launch->upload) {
        CUDA_CHECK(cudaMemcpyAsync(launch->to, launch->from, launch->upload, cudaMemcpyHostToDevice, device.uploads));
        CUDA_CHECK(cudaEventRecord(device.uploaded, device.uploads));
        CUDA_CHECK(cudaStreamWaitEvent(stream, device.uploaded, 0));
    }
    const int most = std::min(LLAMA_ROW_MOST, n_sm);
    for (int first = 0; first < launch->n_rows; first += most) {
        const int n = std::min(most, launch->n_rows - first);
        row_map   map;
        std::copy_n(launch->which + first, n, map.request);
        float *                   logits   = launch->logits + (size_t) first * launch->n_vocab;
        int32_t *                 tokens   = launch->tokens ? launch->tokens + first : nullptr;
        const llama_row_request * requests = launch->requests;
        row_scratch *             scratch  = (row_scratch *) launch->scratch;
        llama_row_result *        results  = launch->results;
        int32_t *                 asked    = launch->asked;
        int                       n_vocab = launch->n_vocab, n_real = launch->n_real;
        void *                    args[] = { &logits, &requests, &map, &scratch, &results, &tokens, &asked, &n_vocab, &n_real };
        const dim3                grid(std::min(RS_MOST_BLOCKS, std::max(1, n_sm / n)), n);
        if (cudaLaunchCooperativeKernel((const void *) row_sample, grid, dim3(RS_THREADS), args, 0, stream) != cudaSuccess) {
            (void) cudaGetLastError(); // a share of the device may have fewer multiprocessors than it tells
            return false;
        }
    }
    CUDA_CHECK(cudaEventRecord(device.sampled, stream));
    return true;
}

#endif
