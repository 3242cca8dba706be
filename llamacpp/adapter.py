"""LoRA adapters: what a context adds to the products of a model's matrices."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API

from .errors import ModelLoadError
from .log import reason, tapped_log

if TYPE_CHECKING:
    from pathlib import Path

    from .model import Model


class LoraAdapter:
    """The GGUF of one adapter, loaded where its model's matrices are; it is freed with the model.

    Its A and B must fit the model, which `read_header` tells: llama.cpp aborts over some that do not.
    Raises ModelLoadError.
    """

    def __init__(self, model: Model, path: Path) -> None:
        with tapped_log() as lines:
            self._handle: Any = C.llama_adapter_lora_init(model._handle, os.fsencode(path))
        if not self._handle:
            raise ModelLoadError(f"llama.cpp could not load the LoRA adapter {path}: {reason(lines)}")
