"""The bundled block drafter with its own head for some of nano's tokens, in both published layouts."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_serve.convert.checkpoint import read_tensors
from qwen_serve.convert.safetensors import read_header, write_file
from tests.checkpoints import edit_json

MODELS = Path(__file__).parent.parent / "models"
NANO, DRAFT = MODELS / "nano", MODELS / "nano-dflash"


def some_tokens(share: float, seed: int = 0) -> npt.NDArray[np.int64]:
    """A share of nano's tokens, in ascending order, as in published tables."""
    size = json.loads((DRAFT / "config.json").read_text())["vocab_size"]
    return np.sort(np.random.default_rng(seed).choice(size, int(share * size), replace=False))


def with_own_vocabulary(
    folder: Path, tokens: npt.NDArray[np.int64], *, speculators: bool = False, **config: Any
) -> Path:
    """Writes the bundled drafter to `folder` with nano's embeddings of `tokens` as its head, and a `d2t`."""
    shutil.copytree(DRAFT, folder)
    tensors = [(t.name, t.dtype, t.read().reshape(t.shape)) for t in read_header(DRAFT / "model.safetensors")]
    embedding = read_tensors(NANO)["model.language_model.embed_tokens.weight"]
    head = embedding.read().reshape(embedding.shape)[tokens]
    offsets = tokens - np.arange(len(tokens))
    tensors += [("lm_head.weight", embedding.dtype, head), ("d2t", "I64", offsets)]
    if speculators:
        tensors.append(("t2d", "I32", np.isin(np.arange(embedding.shape[0]), tokens).astype(np.int32)))
    write_file(folder / "model.safetensors", tensors, {})
    edit_json(folder / "config.json", draft_vocab_size=len(tokens), **config)
    if speculators:
        _wrap(folder / "config.json")
    return folder


def converted(folder: Path) -> Path:
    """The F32 GGUF of a drafter for nano, beside its folder; by another process, as llama.cpp has one log."""
    arguments = ["--src", folder, "--target", NANO, "--quant", "F32", "--out", folder.parent]
    command = [sys.executable, "-m", "qwen_serve.convert", *map(str, arguments)]
    subprocess.run(command, cwd=MODELS.parent, check=True, capture_output=True)
    return folder.with_name(f"{folder.name}-F32.gguf")


def _wrap(path: Path) -> None:
    """Convert a configuration to the speculators library's format."""
    given = json.loads(path.read_text())
    own = given.pop("dflash_config")
    outer = {
        "aux_hidden_state_layer_ids": [layer + 1 for layer in own["target_layer_ids"]],
        "mask_token_id": own["mask_token_id"],
        "speculators_model_type": "dflash",
    }
    outer |= {key: given.pop(key) for key in ("architectures", "block_size", "draft_vocab_size")}
    path.write_text(json.dumps({**outer, "transformer_layer_config": given}))
