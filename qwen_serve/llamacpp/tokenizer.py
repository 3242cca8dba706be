"""The vocabulary for llguidance."""

import ctypes
from typing import Any

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API

from .model import Model

SPECIAL = b"\xff"
"""Marks a special token, which grammars name (`<tool_call>`) and no text matches."""


def llguidance_tokenizer(model: Model) -> Any:
    """An `llguidance.LLTokenizer` that calls into the model's vocabulary: it must not outlive the model.

    Like `llguidance.llamacpp.lltokenizer_from_vocab`, but without the tokens that only pad the vocabulary,
    and without 248,320 warnings about a deprecated function. Takes about a second.
    """
    from llguidance import LLTokenizer

    tokens = [
        (SPECIAL if model.is_added(token) else b"") + model.piece(token, special=True)
        for token in range(model.n_real)
    ]
    tokens += [b""] * (model.n_vocab - model.n_real)
    return LLTokenizer.from_llamacpp(  # type: ignore[attr-defined]
        tokens=tokens,
        vocab_ptr=model._vocab,
        tokenize_fptr=ctypes.cast(C.llama_tokenize, ctypes.c_void_p).value,
        eos_token=sorted(model.eog_ids),
    )
