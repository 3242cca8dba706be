// The texts of all tokens in one call. Bound by qwen_serve/llamacpp/model.py.

#include <cstdint>

struct llama_vocab;

extern "C" int32_t llama_token_to_piece(const llama_vocab * vocab, int32_t token, char * buf, int32_t length, int32_t lstrip, bool special);

#if defined(_WIN32)
#define LLAMA_PIECES_API extern "C" __declspec(dllexport)
#else
#define LLAMA_PIECES_API extern "C" __attribute__((visibility("default")))
#endif

// Writes the texts of tokens 0 to n - 1 one after the other, control tokens spelled out, and where each ends. Returns
// false if `size` bytes are too few.
LLAMA_PIECES_API bool llama_vocab_pieces(const llama_vocab * vocab, int32_t n, char * buf, int32_t size, int32_t * ends) {
    int32_t at = 0;
    for (int32_t token = 0; token < n; token++) {
        const int32_t length = llama_token_to_piece(vocab, token, buf + at, size - at, 0, true);
        if (length < 0) { return false; }
        at += length;
        ends[token] = at;
    }
    return true;
}
