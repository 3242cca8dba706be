"""For any value in a `config.json`, the error names the key, or llama.cpp loads and runs the converted
file."""

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.config import ModelConfig
from qwen_serve.convert.config_keys import FIXED, HARMLESS, READ, ROPE_HARMLESS, ROPE_READ, YARN_FIXED
from qwen_serve.convert.draft import DraftCheckpoint
from qwen_serve.convert.draft_config import DraftConfig
from qwen_serve.convert.errors import CheckpointError, ConvertError
from qwen_serve.convert.gguf_file import write_gguf
from qwen_serve.convert.source import Source
from qwen_serve.convert.tensors import plan_tensors
from tests.checkpoints import edit_json, model_config, write_checkpoint
from tests.drafters import DRAFT, NANO
from tests.processes import run

LAYERS = 4
ODD: list[Any] = [
    None, "x", "", "4", [], ["x"], [0], [1, 1, 1], [-1, 2, 3], {}, {"a": 1}, [[1]], 0, -1, 1, 2, 3, 5, 7,
    1.5, 0.3, True, False, 600, 2000, 2**31, 2**63, 1e39, float("inf"), float("-inf"), float("nan"),
]  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}

LOAD = """
import os, sys
import llama_cpp  # before numpy
import numpy as np
from pathlib import Path
from qwen_serve.llamacpp.evaluation import Batch, EvalContext, Runtime
from qwen_serve.llamacpp.model import Model

for path in sys.argv[1:]:
    if (child := os.fork()) == 0:
        try:
            with Runtime(threads=1, n_gpu_layers=0).load(Path(path)) as model:
                for kind in ("trunk", *(["mtp"] if model.n_nextn else [])):
                    with EvalContext(model, n_ctx=64, n_batch=64, n_seq=1, kind=kind) as context:
                        batch = Batch(context)
                        for position, token in enumerate(range(40)):
                            hidden = None if kind == "trunk" else np.full(model.n_embd, 0.1, np.float32)
                            batch.add(token, position, 0, output=True, hidden=hidden)
                        context.decode(batch)
                        if kind == "trunk":
                            print("logits", path, context.logits()[-1, :8].tolist(), flush=True)
        except BaseException as error:
            print("failed", path, error, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print("failed", path, "status", status, flush=True)
"""


def changed(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Configurations with one value that is another, and what it is."""
    text = READ | FIXED.keys() | HARMLESS | {"eos_token_id", "pad_token_id"}
    places: list[tuple[tuple[str, ...], frozenset[str] | set[str]]] = [
        ((), {"architectures", "text_config", "tie_word_embeddings", "eos_token_id"}),
        (("text_config",), text),
        (("text_config", "rope_parameters"), ROPE_READ | ROPE_HARMLESS | YARN_FIXED.keys()),
    ]
    for place, keys in places:
        for key in sorted(keys):
            for value in ODD:
                other = copy.deepcopy(config)
                inner = other
                for step in place:
                    inner = inner[step]
                inner[key] = value
                yield f"{'.'.join((*place, key))}={value!r}", other


@pytest.mark.slow
@pytest.mark.parametrize("rope", [{}, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("experts", [False, True])
def test_an_odd_value_is_refused_or_runs(tmp_path: Path, experts: bool, rope: dict[str, Any]) -> None:
    config = model_config(LAYERS, experts=experts)
    config["text_config"]["rope_parameters"] |= rope
    base = ModelConfig.from_json(config)
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS, experts="fused" if experts else None)
    made: dict[str, Path] = {}
    seen: list[ModelConfig] = [base]
    refused = 0
    for what, other in [("as it is", config), *changed(config)]:
        edit_json(folder / "config.json", **other)
        try:
            checkpoint = Checkpoint.open(folder)
            if checkpoint.config in seen and made:
                continue  # the same model
            seen.append(checkpoint.config)
            kept = tuple(range(checkpoint.config.n_layers))
            plan = plan_tensors(checkpoint, "F16", kept)
            path = tmp_path / f"{len(made)}.gguf"
            write_gguf(path, checkpoint, Source(folder), plan, kept, "F16")
        except ConvertError:
            refused += 1
        else:
            made[what] = path
    assert refused > 500
    assert len(made) > 5
    script = [sys.executable, "-c", LOAD, *map(str, made.values())]
    done = run(script, check=True, timeout=500)
    failed = [what for what, path in made.items() if f"failed {path} " in done.stdout]
    assert not failed, done.stdout + done.stderr[-2000:]
    logits = dict(
        line.split(maxsplit=2)[1:] for line in done.stdout.splitlines() if line.startswith("logits")
    )
    for what, path in made.items():
        if "mrope_section" in what:  # text has one position a token, whichever section a pair is in
            assert logits[str(path)] == logits[str(made["as it is"])], what


@pytest.mark.parametrize("nested", [False, True])
def test_an_odd_value_in_a_drafter_is_refused_or_read(nested: bool) -> None:
    """An error always names the key of the value."""
    config = json.loads((DRAFT / "config.json").read_text())
    target = Checkpoint.open(NANO)
    refused = 0
    for key in sorted(
        config.keys() | {"head_dim", "draft_vocab_size", "layer_types", "sliding_window", "is_causal"}
    ):
        for value in ODD:
            other = copy.deepcopy(config)
            if nested and isinstance(config.get(key), dict):
                for inner in config[key]:
                    other = copy.deepcopy(config)
                    other[key][inner] = value
                    refused += _refuses(other)
            else:
                other[key] = value
                refused += _refuses(other)
    assert refused > 100
    assert DraftCheckpoint.open(DRAFT, target).config == DraftConfig.from_json(config)


def _refuses(config: dict[str, Any]) -> bool:
    try:
        DraftConfig.from_json(config)
    except CheckpointError as error:
        assert str(error).startswith("config.json: ")
        return True
    return False
