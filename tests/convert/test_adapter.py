"""LoRA adapters give the logits of the merged checkpoint; unsupported ones are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from qwen_serve.convert import cli
from qwen_serve.convert.safetensors import read_header, write_file
from qwen_serve.llamacpp import LoraAdapter
from qwen_serve.llamacpp.evaluation import Batch, EvalContext, Runtime
from tests.adapters import PROJECTIONS, merge, write_adapter
from tests.checkpoints import Layout, edit_json, write_checkpoint
from tests.logits import log_softmax
from tests.marks import slow_but

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 256, 40)]


def run(*arguments: str | Path) -> int:
    return cli.main([str(argument) for argument in arguments])


def converted(folder: Path, *more: str | Path) -> Path:
    """The F32 GGUF of a checkpoint or an adapter, beside its folder."""
    kind = more or ("--quant", "F32", "--no-imatrix", "--no-kld", "--no-vision")
    assert run("--src", folder, "--out", folder.parent, *kind) == 0
    return folder.with_name(f"{folder.name}-F32.gguf")


def rows(gguf: Path, *adapters: tuple[Path, float]) -> Any:
    """[tokens, vocabulary] log-probabilities after each token."""
    with (
        Runtime(threads=1, n_gpu_layers=0).load(gguf) as model,
        EvalContext(model, n_ctx=64, n_batch=64, precise=True) as context,
    ):
        loaded = [(LoraAdapter(model, path), scale) for path, scale in adapters]
        context.context.set_adapters(loaded)
        batch = Batch(context)
        for position, token in enumerate(TOKENS):
            batch.add(token, position, output=True)
        context.decode(batch)
        return log_softmax(context.logits())


@pytest.mark.parametrize(
    ("tied", "experts"), slow_but([(True, None)], [(True, None), (False, None), (True, "fused")])
)
def test_an_adapter_of_every_projection_equals_the_merged_checkpoint(
    tmp_path: Path, tied: bool, experts: Layout | None
) -> None:
    """Three value heads a key head: rows and columns of the delta net's matrices change places."""
    checkpoint = write_checkpoint(tmp_path / "base", dtype="F32", tied=tied, experts=experts)
    adapter = write_adapter(tmp_path / "lora", checkpoint, embedding=not tied)
    model, lora = converted(checkpoint), converted(adapter, "--base", checkpoint)
    merged = converted(merge(tmp_path / "merged", checkpoint, {adapter: 1.0}))
    wanted, plain, found = rows(merged), rows(model), rows(model, (lora, 1.0))
    assert np.abs(wanted - plain).max() > 0.1, "the adapter changes something"
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_each_projection_is_adapted(tmp_path: Path, projection: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "base", layers=4, dtype="F32")
    adapter = write_adapter(tmp_path / "lora", checkpoint, projections=(projection,), size=2)
    model, lora = converted(checkpoint), converted(adapter, "--base", checkpoint)
    wanted = rows(converted(merge(tmp_path / "merged", checkpoint, {adapter: 1.0})))
    assert np.abs(wanted - rows(model)).max() > 1e-2
    np.testing.assert_allclose(rows(model, (lora, 1.0)), wanted, atol=1e-4)


@pytest.mark.slow
def test_two_at_once_each_at_its_scale(tmp_path: Path) -> None:
    """One has a scale of its own for some modules, and by the root of its rank."""
    checkpoint = write_checkpoint(tmp_path / "base", layers=4, dtype="F32")
    first = write_adapter(tmp_path / "first", checkpoint, seed=1)
    patterned: dict[str, Any] = {"use_rslora": True, "alpha_pattern": {"out_proj": 8, "q_proj": 2}}
    second = write_adapter(tmp_path / "second", checkpoint, seed=2, rank=4, alpha=4, size=0.2, **patterned)
    model = converted(checkpoint)
    loras = [
        (converted(folder, "--base", checkpoint), scale) for folder, scale in ((first, 0.5), (second, 1.5))
    ]
    wanted = rows(converted(merge(tmp_path / "merged", checkpoint, {first: 0.5, second: 1.5})))
    np.testing.assert_allclose(rows(model, *loras), wanted, atol=1e-4)


def test_what_it_says_of_itself_is_what_llama_cpp_s_converter_writes(
    tmp_path: Path, checkpoint: Path
) -> None:
    adapter = write_adapter(tmp_path / "mine", checkpoint, alpha=24)
    assert (
        run("--src", adapter, "--out", tmp_path, "--outtype", "F16") == 0
    )  # its configuration names the base
    made = GGUFReader(tmp_path / "mine-F16.gguf")
    said = {key: made.fields[key].contents() for key in made.fields if not key.startswith("GGUF.")}
    assert said["general.type"] == "adapter"
    assert said["general.architecture"] == "qwen35"
    assert (said["adapter.type"], said["adapter.lora.alpha"]) == ("lora", 24.0)
    shapes = {tensor.name: (tensor.tensor_type.name, [*map(int, tensor.shape)]) for tensor in made.tensors}
    assert shapes["blk.0.ssm_out.weight.lora_a"] == ("F16", [192, 8])
    assert shapes["blk.0.ssm_out.weight.lora_b"] == ("F16", [8, 64])
    before = (tmp_path / "mine-F16.gguf").stat().st_mtime_ns
    assert run("--src", adapter, "--out", tmp_path, "--outtype", "F16") == 0
    assert (tmp_path / "mine-F16.gguf").stat().st_mtime_ns == before, "it was there already"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"lora_alpha": 0}, "lora_alpha must be a positive number"),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha_pattern has -1"),
        ({"base_model_name_or_path": "no/such folder"}, "--base names another"),
        ({"base_model_name_or_path": None}, "give --base"),
    ],
)
def test_a_configuration_that_llama_cpp_does_not_apply(
    tmp_path: Path, checkpoint: Path, changes: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "lora", checkpoint)
    edit_json(adapter / "adapter_config.json", **changes)
    assert run("--src", adapter, "--out", tmp_path) == 1
    assert said in capsys.readouterr().err


def renamed(adapter: Path, old: str, new: str) -> None:
    """Replace `old` by `new` in the tensors' names."""
    path = adapter / "adapter_model.safetensors"
    tensors = [(t.name.replace(old, new), t.dtype, t.read().reshape(t.shape)) for t in read_header(path)]
    write_file(path, tensors, {})


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("layers.7.", "layers.8.", "the model has 8 layers: it is another model's"),
        ("layers.3.self_attn.q_proj", "layers.2.self_attn.q_proj", "no such matrix"),
        ("layers.0.mlp.up_proj", "layers.0.mlp.experts.up_proj", "routed experts are not adapted"),
        ("language_model.layers.0.mlp.up_proj", "visual.blocks.0.attn.qkv", "no such matrix"),
        ("layers.0.mlp.up_proj.lora_A", "layers.0.mlp.up_proj.lora_C", "neither A nor B"),
        ("layers.0.mlp.up_proj.lora_A", "layers.9.mlp.up_proj.lora_A", "has no lora_B"),
        ("layers.0.mlp.up_proj", "layers.0.mlp.gate_proj2", "no such matrix"),
        ("layers.0.linear_attn.out_proj", "layers.3.self_attn.o_proj2", "no such matrix"),
    ],
)
def test_tensors_of_another_model(
    tmp_path: Path, checkpoint: Path, old: str, new: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "lora", checkpoint)
    renamed(adapter, old, new)
    assert run("--src", adapter, "--out", tmp_path) == 1
    assert said in capsys.readouterr().err


def test_shapes_of_another_model(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "lora", checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    edit_json(checkpoint / "config.json", text_config=config["text_config"] | {"intermediate_size": 128})
    (other / "config.json").write_text((checkpoint / "config.json").read_text())
    assert run("--src", adapter, "--base", other, "--out", tmp_path) == 1
    assert "it must be [rank, 64] and [128, rank]: is it another model's?" in capsys.readouterr().err


def test_one_tensor_is_both_embedding_and_head(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "lora", checkpoint, embedding=True)
    assert run("--src", adapter, "--out", tmp_path) == 1
    assert "embedding and head are one tensor" in capsys.readouterr().err


def test_flags_that_mean_nothing(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "lora", checkpoint)
    assert run("--src", adapter, "--quant", "Q4_K_M", "--out", tmp_path) == 1
    assert "--quant" in capsys.readouterr().err
    assert run("--src", checkpoint, "--base", checkpoint, "--out", tmp_path) == 1
    assert "--base is for LoRA adapters" in capsys.readouterr().err
