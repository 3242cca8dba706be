#pragma once

#include "llama-batch.h"
#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-kq-mask-bits.h"
#include "llama-kv-cells.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <unordered_map>
#include <vector>

// the KQ mask of a ubatch: one row of n_kv cells for each token, 0 where the token sees the cell and -INF elsewhere
//
// a row costs the memory that it fills and the cells of its own sequence, whatever other sequences hold

// columns that are some of the cells, in ascending order
struct llama_kq_mask_columns {
    struct word {
        uint32_t index; // cells 64*index to 64*index + 63
        uint32_t n;     // columns before it
        uint64_t bits;  // its cells that are columns
    };

    std::vector<word> words;

    uint32_t n = 0;

    void add(uint32_t index, uint64_t bits) {
        words.push_back({ index, n, bits });
        n += popcount(bits);
    }

    // a bitmap of cells as one of columns
    void pack(const std::vector<uint64_t> & cells, std::vector<uint64_t> & res) const {
        res.assign((n + 63) / 64, 0);

        for (const auto & w : words) {
            uint64_t from = w.index < cells.size() ? cells[w.index] & w.bits : 0;
            if (from == 0) { continue; }

            uint64_t to = from;
            if (w.bits != UINT64_MAX) {
                to = 0;
                for (; from; from &= from - 1) { to |= 1ull << popcount(w.bits & ((from & -from) - 1)); }
            }

            res[w.n / 64] |= to << (w.n % 64);
            if (w.n % 64 && to >> (64 - w.n % 64)) { res[w.n / 64 + 1] |= to >> (64 - w.n % 64); }
        }
    }

    static uint32_t popcount(uint64_t bits) { return (uint32_t) std::bitset<64>(bits).count(); }
};

struct llama_kq_mask_args {
    const llama_ubatch & ubatch;

    const std::vector<llama_kv_cells> & v_cells;
    const std::vector<uint32_t> &       seq_to_stream;

    bool causal;
    bool alibi;

    uint32_t              n_swa;
    llama_swa_type        swa_type;
    llama_non_causal_type non_causal_type;

    int64_t n_kv;
    int64_t n_stream;
    int64_t n_tps; // tokens per stream

    uint32_t start = 0; // the cell of the first column, a multiple of 64

    const llama_kq_mask_columns * columns = nullptr; // the cells of the columns, instead of those from start on
};

// of a mask that is made of bits
using llama_kq_mask_bits = uint32_t;

// n is a multiple of 64
[[maybe_unused]] static void llama_kq_mask_expand(const uint64_t * bits, size_t n_words, int64_t n, llama_kq_mask_bits * dst) {
    const size_t n_own = std::min<size_t>(n_words, n / 64);
    if (n_own) { std::memcpy(dst, bits, 8 * n_own); }
    std::memset(dst + 2 * n_own, 0, n / 8 - 8 * n_own);
}

// writes 0 for set bits and -INF for clear ones, n values
template <typename T>
static void llama_kq_mask_expand(const uint64_t * bits, size_t n_words, int64_t n, T * dst) {
    // the values of 8 bits
    static const auto lut = [] {
        std::array<std::array<T, 8>, 256> res;
        for (int b = 0; b < 256; ++b) {
            for (int k = 0; k < 8; ++k) { res[b][k] = llama_cast<T>((b >> k) & 1 ? 0.0f : -INFINITY); }
        }
        return res;
    }();

    const T drop = llama_cast<T>(-INFINITY);

    size_t w = 0;
    for (int64_t j = 0; j < n; j += 64, ++w) {
        const uint64_t b      = w < n_words ? bits[w] : 0;
        const int64_t  n_vals = std::min<int64_t>(64, n - j);
        if (b == 0) {
            std::fill(dst + j, dst + j + n_vals, drop);
        } else if (n_vals == 64) {
            for (int k = 0; k < 8; ++k) { std::memcpy(dst + j + 8 * k, lut[(b >> (8 * k)) & 0xff].data(), sizeof(lut[0])); }
        } else {
            for (int64_t k = 0; k < n_vals; ++k) { dst[j + k] = (b >> k) & 1 ? llama_cast<T>(0.0f) : drop; }
        }
    }
}

// every cell of the sequence up to the token's position (or all of them when not causal); no SWA, no ALiBi
template <typename T, bool causal, bool is_2d>
static void llama_kq_mask_full(const llama_kq_mask_args & args, T * data) {
    const auto & ubatch = args.ubatch;

    // what the last row of a sequence saw: its next row adds the cells in between
    struct seen {
        llama_pos             pos;
        std::vector<uint64_t> bits;
    };
    std::unordered_map<llama_seq_id, seen> seqs;

    // M-RoPE: the cells of a picture have one position, and its rows see them in raster order
    struct picture {
        llama_pos                           pos;
        std::vector<uint64_t>               bits;  // what the last row saw
        std::vector<std::array<int64_t, 3>> cells; // y, x and the cell, in order
        size_t                              n_seen;
    };
    std::unordered_map<llama_seq_id, picture> pictures;

    const size_t w0 = args.start / 64;

    std::vector<uint64_t> packed;

    const auto expand = [&](const std::vector<uint64_t> & bits, T * row) {
        if (args.columns) {
            args.columns->pack(bits, packed);
            llama_kq_mask_expand(packed.data(), packed.size(), args.n_kv, row);
            return;
        }
        const size_t n_skip = std::min(w0, bits.size());
        llama_kq_mask_expand(bits.data() + n_skip, bits.size() - n_skip, args.n_kv, row);
    };

    for (int64_t i = 0; i < args.n_stream * args.n_tps; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];
        const llama_pos    p1     = ubatch.pos[i];

        const auto & cells   = args.v_cells.at(args.seq_to_stream[seq_id]);
        const auto & seq_pos = cells.seq_pos_get(seq_id);
        const auto & all     = cells.seq_bits_get(seq_id);

        T * row = data + args.n_kv * i / (std::is_same_v<T, llama_kq_mask_bits> ? 32 : 1);

        if (!causal) {
            expand(all, row);
            continue;
        }

        const auto next = seq_pos.lower_bound({ p1 + 1, 0 }); // the first cell in the token's future

        const llama_pos p1_x = is_2d ? ubatch.pos[i + ubatch.n_tokens * 2] : 0;
        const llama_pos p1_y = is_2d ? ubatch.pos[i + ubatch.n_tokens] : 0;

        // the token's own cell is not the only one at its position
        const bool in_picture = is_2d && [&] {
            int n = 0;
            for (auto it = next; it != seq_pos.begin() && (--it)->first == p1;) {
                if (++n > 1 || cells.ext_get(it->second).is_2d_gt(p1_x, p1_y)) { return true; }
            }
            return false;
        }();

        if (in_picture) {
            const auto is_gt = [&](const std::array<int64_t, 3> & c) { return c[0] > p1_y || (c[0] == p1_y && c[1] > p1_x); };

            auto & pic = pictures[seq_id];

            if (pic.cells.empty() || pic.pos != p1 || (pic.n_seen > 0 && is_gt(pic.cells[pic.n_seen - 1]))) {
                pic.pos  = p1;
                pic.bits = all;
                pic.cells.clear();
                pic.n_seen = 0;
                for (auto it = seq_pos.lower_bound({ p1, 0 }); it != seq_pos.end(); ++it) {
                    pic.bits[it->second / 64] &= ~(1ull << (it->second % 64));
                    if (it->first == p1) {
                        const auto & ext = cells.ext_get(it->second);
                        pic.cells.push_back({ ext.y, ext.x, it->second });
                    }
                }
                std::sort(pic.cells.begin(), pic.cells.end());
            }
            for (; pic.n_seen < pic.cells.size() && !is_gt(pic.cells[pic.n_seen]); ++pic.n_seen) {
                const int64_t cell = pic.cells[pic.n_seen][2];
                pic.bits[cell / 64] |= 1ull << (cell % 64);
            }
            expand(pic.bits, row);
            continue;
        }

        auto found = seqs.find(seq_id);

        if (next == seq_pos.end() && found == seqs.end()) {
            // the usual case when generating
            expand(all, row);
        } else {
            if (found == seqs.end() || found->second.pos > p1) {
                found = seqs.insert_or_assign(seq_id, seen{ p1, all }).first;
                for (auto it = next; it != seq_pos.end(); ++it) { found->second.bits[it->second / 64] &= ~(1ull << (it->second % 64)); }
            } else {
                for (auto it = seq_pos.lower_bound({ found->second.pos + 1, 0 }); it != next; ++it) {
                    found->second.bits[it->second / 64] |= 1ull << (it->second % 64);
                }
                found->second.pos = p1;
            }
            expand(found->second.bits, row);
        }
    }
}

// with SWA or ALiBi
template <typename T, bool causal, bool swa, bool is_2d, bool alibi>
static void llama_kq_mask_part(const llama_kq_mask_args & args, T * data) {
    const auto & ubatch = args.ubatch;

    const uint32_t n_swa = args.n_swa;

    const T keep = llama_cast<T>(0.0f);
    const T drop = llama_cast<T>(-INFINITY);

    // the min position in the batch for each sequence
    llama_pos seq_pos_min[LLAMA_MAX_SEQ];
    std::fill(seq_pos_min, seq_pos_min + LLAMA_MAX_SEQ, INT32_MAX);

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];

        seq_pos_min[seq_id] = std::min(seq_pos_min[seq_id], ubatch.pos[i]);
    }

    // for tokens of the same sequence, the mask is mostly the same, so we can reuse it
    // the only cells that could change are the ones that are with similar positions as the
    //   ones in the batch (i.e. due to causal masking, SWA, etc.)
    // keep track of those cells and shortcut the loop to save time
    // note: this optimization is not compatible with Alibi position encoding
    // ref:  https://github.com/ggml-org/llama.cpp/pull/18842
    struct first {
        int64_t                                     row;
        std::vector<std::pair<llama_pos, uint32_t>> near;
    };
    std::unordered_map<llama_seq_id, first> seqs;

    for (int64_t i = 0; i < args.n_stream * args.n_tps; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];

        const auto & cells = args.v_cells.at(args.seq_to_stream[seq_id]);

        const llama_pos p1 = ubatch.pos[i];

        // for M-RoPE
        const llama_pos p1_x = is_2d ? ubatch.pos[i + ubatch.n_tokens * 2] : 0;
        const llama_pos p1_y = is_2d ? ubatch.pos[i + ubatch.n_tokens] : 0;

        T * row = data + args.n_kv * i;

        const auto set = [&](llama_pos p0, uint32_t cell) {
            const int64_t j = (int64_t) cell - args.start;

            if (j < 0 || j >= args.n_kv) { return; }

            bool see = true;

            if (causal) {
                // mask future tokens
                see = p0 <= p1;

                // M-RoPE causal mask
                if (is_2d && p0 == p1 && cells.ext_get(cell).is_2d_gt(p1_x, p1_y)) { see = false; }
            }

            // apply SWA if any
            if (swa && see) {
                // see llama_non_causal_type
                const bool in_span = !causal && args.non_causal_type == LLAMA_NON_CAUSAL_TYPE_SWA_FULL && p0 >= seq_pos_min[seq_id];
                see                = in_span || !llama_hparams::is_masked_swa(n_swa, args.swa_type, p0, p1);
            }

            if (!see) {
                row[j] = drop;
            } else if (alibi) {
                row[j] = llama_cast<T>(static_cast<float>(-std::abs(p0 - p1)));
            } else {
                row[j] = keep;
            }
        };

        const auto found = seqs.find(seq_id);

        if (!alibi && found != seqs.end()) {
            std::copy_n(data + args.n_kv * found->second.row, args.n_kv, row);
            for (const auto & [p0, j] : found->second.near) { set(p0, j); }
            continue;
        }

        auto & near      = seqs[seq_id].near;
        seqs[seq_id].row = i;

        std::fill(row, row + args.n_kv, drop);
        for (const auto & [p0, j] : cells.seq_pos_get(seq_id)) {
            set(p0, j);

            // record all cells for which: p0 >= seq_pos_min[seq_id] - n_swa - 32
            if (!alibi && p0 + (int32_t) (n_swa + 32) >= seq_pos_min[seq_id]) { near.emplace_back(p0, j); }
        }
    }
}

template <typename T, bool causal, bool is_2d>
static void llama_kq_mask_fill(const llama_kq_mask_args & args, T * data) {
    const bool swa = args.swa_type != LLAMA_SWA_TYPE_NONE;

    if constexpr (std::is_same_v<T, llama_kq_mask_bits>) {
        GGML_ASSERT(!swa && !args.alibi && args.n_kv % LLAMA_KQ_MASK_BITS_PAD == 0);
        llama_kq_mask_full<T, causal, is_2d>(args, data);
    } else if (swa && args.alibi) {
        llama_kq_mask_part<T, causal, true, is_2d, true>(args, data);
    } else if (swa) {
        llama_kq_mask_part<T, causal, true, is_2d, false>(args, data);
    } else if (args.alibi) {
        llama_kq_mask_part<T, causal, false, is_2d, true>(args, data);
    } else {
        llama_kq_mask_full<T, causal, is_2d>(args, data);
    }
}

// data: [n_kv, n_tps, 1, n_stream]
template <typename T>
static void llama_kq_mask_fill(const llama_kq_mask_args & args, T * data) {
    const bool is_2d = args.ubatch.is_pos_2d();

    if (args.causal) {
        is_2d ? llama_kq_mask_fill<T, true, true>(args, data) : llama_kq_mask_fill<T, true, false>(args, data);
    } else {
        is_2d ? llama_kq_mask_fill<T, false, true>(args, data) : llama_kq_mask_fill<T, false, false>(args, data);
    }
}
