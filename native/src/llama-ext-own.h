#pragma once

// Included by upstream's llama-ext.h: what we add to it.

extern "C" {

// Or-ed to n_rs_seq: there is room for the snapshots of one sequence, in rows behind those of the cells, instead of
// n_rs_seq times the memory of every state. They are those of the last ubatch that had tokens of one sequence only.
#define LLAMA_RS_SEQ_SHARED 0x80000000u

// n_rs_seq for operands instead of snapshots: sequences of 2 to n_rows tokens, with more outputs than the last token's, leave their state as it is, and
// llama_memory_seq_rm() may take all but the first of these tokens back. n_seqs: how many sequences can have operands at the same time.
#define LLAMA_RS_SEQ_OPERANDS             0x40000000u
#define LLAMA_RS_OPERANDS(n_rows, n_seqs) (LLAMA_RS_SEQ_OPERANDS | (uint32_t) (n_seqs) << 8 | (uint32_t) (n_rows))

// A bit of n_rs_seq, for qwen35 and qwen35moe: the delta nets' states are kept in F16, and computed in F32. They are rounded after each token, or, where
// prompts are read as chunks of tokens, after these. States of the convolution stay in F32. A state that was saved in another type is not read.
#define LLAMA_RS_SEQ_STATE_F16 0x20000000u

// n_rows of a context, or 0: for qwen35 and qwen35moe with ragged passes.
LLAMA_API uint32_t llama_n_rs_operands(const struct llama_context * ctx);

// Whether the sequences of a context share their snapshots: not every architecture can.
LLAMA_API bool llama_rs_seq_shared(const struct llama_context * ctx);

// What goes into some layers can stay on the device instead: in a ring of n_rows for each layer. Returns false without
// memory for it. For DFlash, whose drafter reads from the ring of the target.
LLAMA_API bool llama_init_layer_inp_ring(struct llama_context * ctx, const int32_t * lids, size_t n_lids, uint32_t n_rows);

// Let ctx read from the ring of other, which must outlive it.
LLAMA_API void llama_share_layer_inp_ring(struct llama_context * ctx, struct llama_context * other);

// The row of the ring for each token of the next batch, in its order: which it is put to or, with a ring that is shared,
// taken from. No rows: nothing is put there from now on.
LLAMA_API void llama_set_layer_inp_rows(struct llama_context * ctx, const int32_t * rows, size_t n_rows);

// Whether products are faster on a device with copies in FP16 of quantized weights, from some number of columns on.
LLAMA_API bool llama_dev_keeps_f16_copies(ggml_backend_dev_t dev);

// Keep such copies of all quantized matrices on such devices, but for experts and for a token embedding that is not the output
// head, too. They live as long as the model and serve all of its contexts. Call before the first decode.
// Returns their size in bytes. A device without room for all of them gets none.
LLAMA_API size_t llama_model_keep_f16_copies(struct llama_model * model);

// Put all quantized matrices, but for experts, on devices that can into an order in which products with few columns are faster, in place.
// FP16 copies must have been made before. Returns the size in bytes of what was repacked.
LLAMA_API size_t llama_model_repack_weights(struct llama_model * model);

// In ubatches of up to LLAMA_BATCH_INVARIANT_MAX tokens a row has the same bits whatever the other rows: of other sequences, with
// KV cells of their own (kv_unified = false), or of its own. For kernels that can do that: on the CPU all; on CUDA products
// with FP16 weights or copies (Hopper) and flash attention.
// A row also has them whatever n_rs_seq, which must be below n_last, in ubatches of any size. 0, the default: off.
#define LLAMA_BATCH_INVARIANT_MAX 64
LLAMA_API void llama_set_batch_invariant(struct llama_context * ctx, uint32_t n_last);

// Whether ubatches have the tokens of a batch in its order, sequence by sequence, whatever their numbers. Else each has as many of all its sequences.
LLAMA_API bool llama_ragged_passes(const struct llama_context * ctx);
}
