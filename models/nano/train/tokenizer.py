"""The nano tokenizer: byte-level BPE behind Qwen3.5's pre-tokenizer, with Qwen3.5's special tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# llama.cpp knows this pattern as "qwen35" (src/llama-vocab.cpp): digits alone, marks with their letters
PRETOKENIZE_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

BYTE_LEVEL: dict[str, Any] = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}

# text and `special` (False: shown when decoding with skip_special_tokens), in the order of the official ids
SPECIAL_TOKENS: tuple[tuple[str, bool], ...] = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
    ("<|audio_start|>", True),
    ("<|audio_end|>", True),
    ("<tts_pad>", True),
    ("<tts_text_bos>", True),
    ("<tts_text_eod>", True),
    ("<tts_text_bos_single>", True),
    ("<|audio_pad|>", True),
)


# the rest of the vocabulary, up to Shape.vocab_size, stays empty, as in the official checkpoints
BPE_SIZE = 3_584


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Exactly `size` BPE tokens (the 256 bytes among them) learnt from `texts`, plus SPECIAL_TOKENS.

    Raises ValueError when the texts hold too few distinct pairs to learn that many.
    """
    tokenizer = Tokenizer(models.BPE(fuse_unk=False, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(**BYTE_LEVEL),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel(**BYTE_LEVEL)
    tokenizer.post_processor = processors.ByteLevel(**BYTE_LEVEL)
    trainer = BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"the texts gave {tokenizer.get_vocab_size()} BPE tokens, {size} were asked for")
    for text, special in SPECIAL_TOKENS:
        token = AddedToken(text, special=special, normalized=False)
        if special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The id of each of SPECIAL_TOKENS by its text."""
    vocabulary = tokenizer.get_vocab()
    return {text: vocabulary[text] for text, _ in SPECIAL_TOKENS}


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, vocab.json and merges.txt."""
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
