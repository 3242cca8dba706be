// the KQ mask and the bitmaps of the KV cells against the straightforward versions: random cells, random ubatches

#include "../src/llama-kv-mask.h"

#include "ggml-cpp.h"
#include "ggml.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>

// the mask cell by cell
template <typename T>
static void kq_mask_ref(const llama_kq_mask_args & args, T * data) {
    const auto & ubatch = args.ubatch;

    std::vector<llama_pos> seq_pos_min(LLAMA_MAX_SEQ, INT32_MAX);
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        auto & p = seq_pos_min[ubatch.seq_id[i][0]];
        p        = std::min(p, ubatch.pos[i]);
    }

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];
        const llama_pos    p1     = ubatch.pos[i];

        const auto & cells = args.v_cells.at(args.seq_to_stream[seq_id]);

        for (int64_t j = 0; j < args.n_kv; ++j) {
            bool see = !cells.is_empty(j) && cells.seq_has(j, seq_id);

            const llama_pos p0 = see ? cells.pos_get(j) : -1;

            if (see && args.causal) {
                see = p0 < p1 || (p0 == p1 && !(ubatch.is_pos_2d() && cells.ext_get(j).is_2d_gt(
                                                                              ubatch.pos[i + ubatch.n_tokens * 2], ubatch.pos[i + ubatch.n_tokens])));
            }
            if (see && args.swa_type != LLAMA_SWA_TYPE_NONE) {
                // see llama_non_causal_type
                const bool in_span = !args.causal && args.non_causal_type == LLAMA_NON_CAUSAL_TYPE_SWA_FULL && p0 >= seq_pos_min[seq_id];
                see                = in_span || !llama_hparams::is_masked_swa(args.n_swa, args.swa_type, p0, p1);
            }

            data[args.n_kv * i + j] = llama_cast<T>(!see ? -INFINITY : args.alibi ? static_cast<float>(-std::abs(p0 - p1)) : 0.0f);
        }
    }
}

// a ubatch that owns its data
struct test_ubatch {
    std::vector<llama_pos>      pos;
    std::vector<int32_t>        n_seq_id;
    std::vector<llama_seq_id>   ids;
    std::vector<llama_seq_id *> seq_id;
    llama_ubatch                ub = {};

    // the tokens' sequences and positions; x and y count for n_pos == 4
    void set(const std::vector<llama_seq_id> & seqs, const std::vector<llama_pos> & p, uint32_t n_pos, const std::vector<llama_pos> & y = {},
            const std::vector<llama_pos> & x = {}) {
        const size_t n = seqs.size();

        ids = seqs;
        n_seq_id.assign(n, 1);
        seq_id.clear();
        for (auto & id : ids) { seq_id.push_back(&id); }

        pos.assign(n * n_pos, 0);
        std::copy(p.begin(), p.end(), pos.begin());
        if (n_pos >= 3) {
            std::copy(y.begin(), y.end(), pos.begin() + n);
            std::copy(x.begin(), x.end(), pos.begin() + 2 * n);
        }

        ub          = {};
        ub.n_tokens = n;
        ub.n_pos    = n_pos;
        ub.pos      = pos.data();
        ub.n_seq_id = n_seq_id.data();
        ub.seq_id   = seq_id.data();
    }
};

static std::mt19937 rng(42);

static int rnd(int a, int b) { // inclusive
    return std::uniform_int_distribution<int>(a, b)(rng);
}

// bitmaps must tell what the cells tell
static bool check_bits(const llama_kv_cells & cells, int n_seq) {
    for (int s = 0; s < n_seq; ++s) {
        const auto & bits = cells.seq_bits_get(s);
        for (uint32_t i = 0; i < cells.size(); ++i) {
            const bool in  = !cells.is_empty(i) && cells.seq_has(i, s);
            const bool bit = i / 64 < bits.size() && ((bits[i / 64] >> (i % 64)) & 1);
            if (in != bit) {
                fprintf(stderr, "cell %u, sequence %d: %d in the cells, %d in the bitmap\n", i, s, in, bit);
                return false;
            }
        }
    }
    return true;
}

// what the cache does to its cells
static void mutate(llama_kv_cells & cells, int n_seq, int n_ops) {
    for (int o = 0; o < n_ops; ++o) {
        const int s = rnd(0, n_seq - 1);
        const int t = rnd(0, n_seq - 1);

        const llama_pos p0 = rnd(0, 1) ? 0 : rnd(0, std::max(0, cells.seq_pos_max(s)));
        const llama_pos p1 = rnd(0, 1) ? INT32_MAX : p0 + rnd(0, 40);

        switch (rnd(0, 11)) {
            case 0: // seq_rm
                for (uint32_t i = 0; i < cells.size(); ++i) {
                    if (cells.pos_in(i, p0, p1) && cells.seq_has(i, s)) { cells.seq_rm(i, s); }
                }
                break;
            case 1: // seq_cp
            case 2:
                for (uint32_t i = 0; i < cells.size(); ++i) {
                    if (s != t && cells.pos_in(i, p0, p1) && cells.seq_has(i, s) && !cells.seq_has(i, t)) { cells.seq_add(i, t); }
                }
                break;
            case 3: // seq_add
                for (uint32_t i = 0; i < cells.size(); ++i) {
                    if (cells.pos_in(i, p0, p1) && cells.seq_has(i, s)) { cells.pos_add(i, rnd(-3, 3)); }
                }
                cells.reset_shift();
                break;
            case 4: // seq_div
                if (rnd(0, 4) == 0) {
                    for (uint32_t i = 0; i < cells.size(); ++i) {
                        if (cells.pos_in(i, p0, p1) && cells.seq_has(i, s)) { cells.pos_div(i, 2); }
                    }
                    cells.reset_shift();
                }
                break;
            case 5: // seq_keep
                if (rnd(0, 20) == 0) {
                    for (uint32_t i = 0; i < cells.size(); ++i) { cells.seq_keep(i, s); }
                }
                break;
            case 6: // save, overwrite, restore
                if (const uint32_t n = cells.size() / 4; n > 0) {
                    const uint32_t i0    = rnd(0, cells.size() - n);
                    const auto     saved = cells.cp(i0, n);
                    for (uint32_t i = i0; i < i0 + n; ++i) {
                        if (!cells.is_empty(i)) {
                            cells.rm(i);
                        } else if (rnd(0, 1)) {
                            cells.pos_set(i, rnd(0, 50));
                            cells.seq_add(i, s);
                        }
                    }
                    cells.set(i0, saved);
                }
                break;
            case 7:
                if (rnd(0, 50) == 0) { cells.reset(); }
                break;
            default: // append to a sequence
            {
                int n = rnd(1, 30);
                for (uint32_t i = rnd(0, 1) ? 0 : rnd(0, cells.size() - 1); i < cells.size() && n > 0; ++i) {
                    if (cells.is_empty(i)) {
                        const llama_pos p = cells.seq_pos_max(s) + rnd(0, 9) / 9 + (rnd(0, 3) > 0);
                        if (p < 0) { continue; }
                        cells.pos_set(i, p);
                        cells.ext_set(i, { rnd(0, 3), rnd(0, 3), 0 });
                        cells.seq_add(i, s);
                        --n;
                    }
                }
            } break;
        }
    }
}

// the mask that is made of bits
template <typename T>
static bool check_bits_mask(const llama_kq_mask_args & args, const std::vector<T> & want) {
    ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead() * 2 + want.size() * (sizeof(T) + 1) + 256, nullptr, false }));

    ggml_tensor * bits = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, args.n_kv / 32, args.n_stream * args.n_tps);
    ggml_tensor * mask = llama_kq_mask_of_bits(ctx.get(), bits, sizeof(T) == 2 ? GGML_TYPE_F16 : GGML_TYPE_F32);
    std::memset(bits->data, 0x55, ggml_nbytes(bits));
    llama_kq_mask_fill(args, (llama_kq_mask_bits *) bits->data);
    for (int i = 0; i < 3; ++i) { llama_kq_mask_of_bits_compute(mask, i, 3, nullptr); }

    return std::memcmp(mask->data, want.data(), want.size() * sizeof(T)) == 0;
}

template <typename T>
static bool check_mask(const llama_kq_mask_args & args, const std::string & what) {
    const size_t n = args.n_kv * args.n_stream * args.n_tps;

    // garbage, so that a value which is not written shows
    std::vector<T> have(n, llama_cast<T>(7.0f));
    std::vector<T> want(n, llama_cast<T>(-7.0f));

    llama_kq_mask_fill(args, have.data());
    kq_mask_ref(args, want.data());

    for (size_t i = 0; i < n; ++i) {
        if (std::memcmp(&have[i], &want[i], sizeof(T)) != 0) {
            fprintf(stderr, "%s: token %d, cell %d: %f, not %f\n", what.c_str(), (int) (i / args.n_kv), (int) (i % args.n_kv),
                    (double) llama_cast<float>(have[i]), (double) llama_cast<float>(want[i]));
            return false;
        }
    }

    if (args.swa_type == LLAMA_SWA_TYPE_NONE && !args.alibi && args.n_kv % LLAMA_KQ_MASK_BITS_PAD == 0 && !check_bits_mask(args, want)) {
        fprintf(stderr, "%s: made of bits\n", what.c_str());
        return false;
    }

    // a window has the same columns
    llama_kq_mask_args args_window = args;
    args_window.start              = 64 * rnd(0, (args.n_kv - 1) / 64);
    args_window.n_kv               = rnd(1, args.n_kv - args_window.start);
    llama_kq_mask_fill(args_window, have.data());

    for (int64_t i = 0; i < args.n_stream * args.n_tps; ++i) {
        if (std::memcmp(have.data() + args_window.n_kv * i, want.data() + args.n_kv * i + args_window.start, args_window.n_kv * sizeof(T)) != 0) {
            fprintf(stderr, "%s: token %d, cells from %d\n", what.c_str(), (int) i, (int) args_window.start);
            return false;
        }
    }

    if (args.n_stream != 1 || args.swa_type != LLAMA_SWA_TYPE_NONE || args.alibi) { return true; }

    // so have some of the cells, and columns behind them are dropped
    llama_kq_mask_columns columns;
    std::vector<uint32_t> cells;
    for (uint32_t w = 0; w < (args.n_kv + 63) / 64; ++w) {
        uint64_t bits = 0;
        for (uint32_t j = 64 * w, all = rnd(0, 2); j < std::min<uint32_t>(args.n_kv, 64 * (w + 1)); ++j) {
            if (all == 2 || (all == 1 && rnd(0, 1))) {
                bits |= 1ull << (j % 64);
                cells.push_back(j);
            }
        }
        if (bits) { columns.add(w, bits); }
    }
    if (cells.empty()) { return true; }

    llama_kq_mask_args args_columns = args;
    args_columns.columns            = &columns;
    args_columns.n_kv               = cells.size() + rnd(0, 70);
    have.assign(args_columns.n_kv * args.n_tps, llama_cast<T>(7.0f));
    llama_kq_mask_fill(args_columns, have.data());

    const T drop = llama_cast<T>(-INFINITY);

    for (size_t i = 0; i < have.size(); ++i) {
        const size_t j      = i % args_columns.n_kv;
        const T &    wanted = j < cells.size() ? want[args.n_kv * (i / args_columns.n_kv) + cells[j]] : drop;
        if (std::memcmp(&have[i], &wanted, sizeof(T)) != 0) {
            fprintf(stderr, "%s: token %d, column %d\n", what.c_str(), (int) (i / args_columns.n_kv), (int) j);
            return false;
        }
    }
    return true;
}

static bool fuzz() {
    int n_masks = 0;

    for (int round = 0; round < 300; ++round) {
        const int  n_seq    = rnd(1, 9);
        const bool streams  = rnd(0, 3) == 0; // a stream for each sequence, or unified
        const int  n_stream = streams ? n_seq : 1;
        const int  n_cells  = rnd(0, 2) ? 64 * rnd(1, 6) : rnd(20, 300);

        std::vector<llama_kv_cells> v_cells(n_stream);
        for (auto & cells : v_cells) { cells.resize(n_cells); }

        std::vector<uint32_t> seq_to_stream(n_seq);
        for (int s = 0; s < n_seq; ++s) { seq_to_stream[s] = streams ? s : 0; }

        for (int step = 0; step < 20; ++step) {
            for (int s = 0; s < n_stream; ++s) {
                if (!streams) {
                    mutate(v_cells[0], n_seq, 5);
                } else {
                    // only its own sequence lives in a stream
                    auto & cells = v_cells[s];
                    for (uint32_t i = 0, n = rnd(0, 20); i < cells.size() && n > 0; ++i) {
                        if (cells.is_empty(i)) {
                            cells.pos_set(i, cells.seq_pos_max(s) + 1);
                            cells.seq_add(i, s);
                            --n;
                        }
                    }
                }
                if (!check_bits(v_cells[s], n_seq)) { return false; }
            }

            // a ubatch: each token in its sequence at or near the end
            const int n_tps = rnd(1, rnd(0, 3) ? 4 : 20);
            const int n_pos = rnd(0, 1) ? 1 : 4;

            const bool same = rnd(0, 1); // equal sequences one after the other, or mixed

            std::vector<llama_seq_id> seqs;
            std::vector<llama_pos>    pos;
            std::vector<llama_pos>    y;
            std::vector<llama_pos>    x;

            for (int s = 0; s < n_stream; ++s) {
                llama_seq_id seq = streams ? s : rnd(0, n_seq - 1);
                for (int t = 0; t < n_tps; ++t) {
                    if (!streams && !same) { seq = rnd(0, n_seq - 1); }
                    const llama_pos last = std::max(0, v_cells[seq_to_stream[seq]].seq_pos_max(seq));
                    seqs.push_back(seq);
                    pos.push_back(std::max(0, last + t - rnd(0, 3) * (rnd(0, 2) > 0 ? 1 : 8)));
                    y.push_back(rnd(0, 3));
                    x.push_back(rnd(0, 3));
                }
            }

            test_ubatch batch;
            batch.set(seqs, pos, n_pos, y, x);

            uint32_t used = 1;
            for (const auto & cells : v_cells) { used = std::max(used, cells.used_max_p1()); }

            for (int k = 0; k < 12; ++k) {
                llama_kq_mask_args args = {
                    /*.ubatch          =*/batch.ub,
                    /*.v_cells         =*/v_cells,
                    /*.seq_to_stream   =*/seq_to_stream,
                    /*.causal          =*/rnd(0, 3) > 0,
                    /*.alibi           =*/rnd(0, 3) == 0,
                    /*.n_swa           =*/(uint32_t) rnd(1, 40),
                    /*.swa_type        =*/(llama_swa_type) rnd(0, 3),
                    /*.non_causal_type =*/(llama_non_causal_type) rnd(0, 2),
                    /*.n_kv            =*/rnd(0, 1) ? n_cells : (int64_t) rnd(used, n_cells),
                    /*.n_stream        =*/n_stream,
                    /*.n_tps           =*/n_tps,
                };
                if (k < 6) {
                    args.swa_type = LLAMA_SWA_TYPE_NONE;
                    args.alibi    = false;
                }
                const std::string what = "round " + std::to_string(round) + ", causal " + std::to_string(args.causal) + ", alibi " +
                                         std::to_string(args.alibi) + ", swa type " + std::to_string(args.swa_type) + ", positions " +
                                         std::to_string(n_pos) + ", streams " + std::to_string(n_stream);

                if (!check_mask<ggml_fp16_t>(args, what) || !check_mask<float>(args, what)) { return false; }
                n_masks += 2;
            }
        }
    }

    printf("%d masks are equal\n", n_masks);

    return true;
}

int main() { return fuzz() ? 0 : 1; }
