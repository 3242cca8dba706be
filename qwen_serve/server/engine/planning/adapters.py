"""LoRA adapters: reads their files and checks them against the model's."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from qwen_serve.llamacpp.errors import ModelLoadError
from qwen_serve.llamacpp.gguf import Header
from qwen_serve.server.engine.model_file import ModelFile

ADAPTED = re.compile(
    r"(?:blk\.(\d{1,6})\.(?:attn_(?:q|k|v|output|qkv|gate)|ssm_(?:out|alpha|beta)"
    r"|ffn_(?:gate|up|down)(?:_exps|_shexp)?|ffn_gate_inp(?:_shexp)?)|output|token_embd)\.weight"
)
"""The matrices to whose products llama.cpp adds an adapter (`build_lora_mm` in src/models/qwen35.cpp and
qwen35moe.cpp). It silently ignores adapters of other matrices."""

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class AdapterSpec:
    """One adapter."""

    name: str
    """Its name in requests."""
    path: Path
    fingerprint: str
    """Fingerprint of its file, part of the key of states computed with it."""
    blocks: Mapping[int, int]
    """Bytes by block of the model; -1: embedding and head."""
    widest: int
    """Elements per token of the largest product that it adds in a block."""

    @classmethod
    def from_header(cls, name: str, header: Header, model: Header, n_trunk: int) -> Self:
        """Raises ModelLoadError if the file is no adapter or belongs to another model."""
        about = header.metadata
        kind = about.get("general.type"), about.get("adapter.type")
        if kind != ("adapter", "lora"):
            raise ModelLoadError(
                f"{header.name} is no LoRA adapter: general.type and adapter.type are {kind[0]!r} and "
                f"{kind[1]!r}; qwen-convert makes one of what PEFT wrote"
            )
        arch, own = about.get("general.architecture"), model.metadata.get("general.architecture")
        if arch != own:
            raise ModelLoadError(f"{header.name} is for architecture {arch!r}, the model's is {own!r}")
        if "adapter.alora.invocation_tokens" in about:
            raise ModelLoadError(
                f"{header.name} is an activated LoRA (aLoRA), which begins inside a prompt: not served"
            )
        blocks: Counter[int] = Counter()
        widest = 0
        for tensor in header.tensors.values():
            base, dot, part = tensor.name.rpartition(".")
            if not dot or part not in ("lora_a", "lora_b") or not (found := ADAPTED.fullmatch(base)):
                raise ModelLoadError(f"{header.name}: llama.cpp does not apply tensor {tensor.name}")
            block = -1 if found[1] is None else int(found[1])
            blocks[block] += tensor.n_bytes
            if part == "lora_a":
                _check_pair(header, model, base)
                if block >= n_trunk:
                    raise ModelLoadError(f"{header.name}: {base} is of the MTP head, which has no adapters")
                if block >= 0:
                    widest = max(widest, model.tensors[base].shape[1])
            elif f"{base}.lora_a" not in header.tensors:
                raise ModelLoadError(f"{header.name}: {base} has no lora_a")
        if not blocks:
            raise ModelLoadError(f"{header.name} holds no tensor")
        fingerprint = ModelFile.of(header.path, header.status).fingerprint()
        return cls(name, header.path, fingerprint, blocks, widest)


def _check_pair(header: Header, model: Header, base: str) -> None:
    """Raises ModelLoadError if A and B do not fit their matrix, because llama.cpp would abort."""
    a, b = header.tensors[f"{base}.lora_a"], header.tensors.get(f"{base}.lora_b")
    if b is None:
        raise ModelLoadError(f"{header.name}: {base} has no lora_b")
    if base == EMBEDDING and OUTPUT not in model.tensors:
        raise ModelLoadError(
            f"{header.name} adapts {base}, which is the model's head, too: llama.cpp adapts neither; merge "
            "the adapter into the checkpoint"
        )
    if (weight := model.tensors.get(base)) is None:
        raise ModelLoadError(f"{header.name} is another model's: this one has no {base}")
    whole = (*(shape := a.shape), *[1] * (3 - len(shape)))
    other = (*(shape := b.shape), *[1] * (3 - len(shape)))
    wanted = (*(shape := weight.shape), *[1] * (3 - len(shape)))
    if base == EMBEDDING:  # here A has a row for each token
        fits = whole == (other[0], wanted[1], 1) and other[1] == wanted[0]
    else:
        fits = whole == (wanted[0], other[0], wanted[2]) and other[1:] == wanted[1:]
    if not fits:
        raise ModelLoadError(
            f"{header.name} is another model's: A and B of {base} are {list(a.shape)} and {list(b.shape)}, "
            f"the model's matrix {list(weight.shape)} (the row's length first)"
        )
