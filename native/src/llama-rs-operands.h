#pragma once

#include "ggml.h"

#include <algorithm>
#include <cstdint>
#include <vector>

// Operands of the recurrent layers: what a delta net reads of a token, before the convolution and the gates. A pass that verifies a draft keeps
// its operands and leaves the state as it is; the accepted ones are folded into the state before that is read again.
struct llama_rs_operands {
    uint32_t n_rows = 0; // rows of a sequence: its longest verification; 0: there are none
    uint32_t n_seqs = 0; // sequences that can have operands at the same time

    struct layer {
        ggml_tensor * x     = nullptr; // [channels, n_rows*n_seqs + 1], the last row is for tokens that are not verified
        ggml_tensor * alpha = nullptr; // [heads, ..]
        ggml_tensor * beta  = nullptr; // [heads, ..]
    };
    std::vector<layer> layers;

    // those that belong behind a cell's state
    struct kept {
        uint32_t n     = 0;
        uint32_t place = 0; // rows from place*n_rows on
        uint64_t age   = 0;
    };
    std::vector<kept> of_cell;
    uint64_t          age = 0;

    // a state is read from cell src (zeros if -1), n operands are folded into it, and it is written to cell dst
    struct fold {
        int32_t  src;
        int32_t  dst;
        uint32_t place;
        uint32_t n;
    };

    // of the current ubatch
    std::vector<bool> verified; // by sequence
    std::vector<fold> folds;    // states before the ubatch reads them
    std::vector<fold> moves;    // then: states that must not stay in a cell that another sequence writes to
    std::vector<fold> in_pass;  // folds that each layer of the ubatch does before it reads a state

    // folds as a graph's inputs, in one tensor: state s is read from row ids[s] (-1: zeros) and written to row to[s], and has the operands in
    // rows[offsets[s]] to rows[offsets[s + 1] - 1]
    struct inputs {
        ggml_tensor * ids     = nullptr; // I32 [n]
        ggml_tensor * to      = nullptr; // I32 [n]
        ggml_tensor * offsets = nullptr; // I32 [n + 1]
        ggml_tensor * rows    = nullptr; // I32 [n*n_rows]
    };

    int64_t n_inputs(int64_t n) const { return 3 * n + 1 + n * n_rows; }

    inputs view_inputs(ggml_context * ctx, ggml_tensor * all, int64_t first, int64_t n) const {
        const auto view = [&](int64_t from, int64_t size) { return ggml_view_1d(ctx, all, size, (first + from) * sizeof(int32_t)); };
        return { view(0, n), view(n, n), view(2 * n, n + 1), view(3 * n + 1, n * n_rows) };
    }

    // those behind the folds' own keep the state in row `spare`
    std::vector<int32_t> input_values(const std::vector<fold> & folds, int64_t n, int32_t spare) const {
        std::vector<int32_t> res(n_inputs(n), spare);

        int32_t * offsets = res.data() + 2 * n;
        int32_t * rows    = offsets + n + 1;
        std::fill(rows, rows + n * n_rows, n_rows * n_seqs);
        offsets[0] = 0;
        for (int64_t s = 0; s < n; ++s) {
            offsets[s + 1] = offsets[s];
            if (s >= (int64_t) folds.size()) { continue; }
            res[s]     = folds[s].src;
            res[n + s] = folds[s].dst;
            for (uint32_t i = 0; i < folds[s].n; ++i) { rows[offsets[s + 1]++] = folds[s].place * n_rows + i; }
        }

        return res;
    }

    bool any_verified() const {
        for (const bool one : verified) {
            if (one) { return true; }
        }
        return false;
    }

    // llama_context_params::n_rs_seq with LLAMA_RS_SEQ_OPERANDS
    void set(uint32_t n_rs_seq) {
        n_rows = n_rs_seq & 0xff;
        n_seqs = (n_rs_seq >> 8) & 0xffff;
    }

    void init(uint32_t n_layer, uint32_t n_cells) {
        layers.resize(n_layer);
        of_cell.resize(n_cells);
    }

    // per layer
    void add(ggml_context * ctx, int il, int64_t n_channels, int64_t n_heads) {
        if (n_rows == 0) { return; }

        const auto make = [&](int64_t n, const char * name) {
            ggml_tensor * res = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, n_rows * n_seqs + 1);
            ggml_format_name(res, "cache_op_%s_l%d", name, il);
            return res;
        };
        layers[il] = { make(n_channels, "x"), make(n_heads, "alpha"), make(n_heads, "beta") };
    }
};
