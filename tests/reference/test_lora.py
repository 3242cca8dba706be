"""Logits with a LoRA adapter: the GGUFs against transformers and PEFT."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qwen_serve.convert import cli
from qwen_serve.llamacpp import LoraAdapter
from qwen_serve.llamacpp.evaluation import Batch, EvalContext, Runtime
from tests.adapters import PROJECTIONS
from tests.logits import log_softmax, mean_kl_divergence
from tests.reference.golden import CHECKPOINT, load_reference, log_probabilities

pytestmark = pytest.mark.reference

LENGTH, SEQUENCES = 64, 8


@pytest.fixture(scope="module")
def sequences() -> NDArray[np.int32]:
    return np.random.default_rng(0).integers(0, 3584, (SEQUENCES, LENGTH), np.int32)


def train(model: Any, sequences: NDArray[np.int32]) -> None:
    """Train an adapter with a few large steps on its own texts, so that no B is zero."""
    import torch

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    ids = torch.from_numpy(sequences.astype(np.int64))
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("more", [{}, {"use_rslora": True, "alpha_pattern": {"in_proj_qkv": 4}}])
def test_logits_equal_those_of_peft(
    tmp_path: Path, nano_f32: Path, sequences: NDArray[np.int32], more: dict[str, Any]
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    trunk = rf".*language_model\.layers\.\d+\..*\.({'|'.join(PROJECTIONS)})"
    model = get_peft_model(load_reference(), LoraConfig(r=8, lora_alpha=16, target_modules=trunk, **more))
    train(model, sequences)
    model.eval().save_pretrained(tmp_path / "lora")
    with model.disable_adapter():
        plain = log_probabilities(model, sequences)
    wanted = log_probabilities(model, sequences)
    arguments = ["--src", tmp_path / "lora", "--base", CHECKPOINT, "--out", tmp_path]
    assert cli.main([*map(str, arguments)]) == 0
    found = []
    with (
        Runtime(threads=1, n_gpu_layers=0).load(nano_f32) as gguf,
        EvalContext(gguf, n_ctx=LENGTH, n_batch=LENGTH, precise=True) as context,
    ):
        context.context.set_adapters([(LoraAdapter(gguf, tmp_path / "lora-F32.gguf"), 1.0)])
        for sequence in sequences:
            context.clear()
            batch = Batch(context)
            for position, token in enumerate(sequence.tolist()):
                batch.add(token, position, output=True)
            context.decode(batch)
            found.append(log_softmax(context.logits()))
    assert mean_kl_divergence(wanted, plain) > 0.1, "the adapter changes something"
    assert mean_kl_divergence(wanted, np.stack(found)) < 1e-5
