"""GGUFs that are wrong are refused in words, never by an abort."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.gguf_file import write_gguf
from qwen_serve.convert.source import Source
from qwen_serve.convert.split import split
from qwen_serve.convert.stages import Output, StageRecord
from qwen_serve.convert.tensors import plan_tensors
from qwen_serve.convert.vision import VisionTower as Tower
from qwen_serve.convert.vision import read_preprocessor, write_mmproj
from qwen_serve.llamacpp.adapter import LoraAdapter
from qwen_serve.llamacpp.errors import LlamaError, ModelLoadError
from qwen_serve.llamacpp.evaluation import Batch, EvalContext, Runtime
from qwen_serve.llamacpp.vision import VisionTower, has_vision
from qwen_serve.server.engine.planning.fit import plan_memory
from qwen_serve.server.engine.planning.spec import read_checked
from tests.checkpoints import write_checkpoint
from tests.gguf_mutations import I32, mutations, read
from tests.server.engine.helpers import settings

LAYERS, KINDS = 4, ("model", "tower", "adapter")


@dataclass(frozen=True)
class Files:
    """A tiny model, its vision tower and an adapter."""

    model: Path
    tower: Path
    adapter: Path

    def path(self, kind: str) -> Path:
        found: Path = getattr(self, kind)
        return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    out = tmp_path_factory.mktemp("files")
    folder = write_checkpoint(out / "tiny", layers=LAYERS, vision=True)
    checkpoint, kept = Checkpoint.open(folder), tuple(range(LAYERS))
    found = Files(out / "tiny.gguf", out / "mmproj.gguf", out / "adapter.gguf")
    plan = plan_tensors(checkpoint, "F16", kept)
    write_gguf(found.model, checkpoint, Source(folder), plan, kept, "F16")
    preprocessor = read_preprocessor(folder)
    assert preprocessor is not None
    write_mmproj(found.tower, Tower.open(checkpoint, preprocessor), Source(folder), "F16")
    writer = gguf.GGUFWriter(found.adapter, "qwen35")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    random = np.random.default_rng(0)
    for base, (columns, rows) in {"blk.0.ffn_down": (96, 64), "blk.3.attn_q": (64, 256)}.items():
        for part, shape in (("lora_a", (4, columns)), ("lora_b", (rows, 4))):
            writer.add_tensor(f"{base}.weight.{part}", random.standard_normal(shape).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def check(files: Files, kind: str, path: Path) -> None:
    """What the server does before it loads. Raises ModelLoadError."""
    every: dict[str, dict[str, Any]] = {"tower": {"mmproj": path}, "adapter": {"lora": f"x={path}"}}
    chosen = every.get(kind, {})
    model = path if kind == "model" else files.model
    plan_memory(settings(model).replace(**chosen), read_checked(model))


def use(files: Files, kind: str, path: Path) -> None:
    """Loads the file and computes with every part of it."""
    with Runtime(threads=1, n_gpu_layers=0).load(path if kind == "model" else files.model) as model:
        if kind == "tower":
            with VisionTower(path, model, threads=1, use_gpu=False, flash_attn=False) as tower:
                assert np.isfinite(tower.encode(tower.prepare(np.full((64, 64, 3), 99, np.uint8)))).all()
            return
        if kind == "adapter":
            LoraAdapter(model, path)
            return
        model.detokenize(range(model.n_vocab))
        model.tokenize("hello <|im_start|>")
        model.metadata()
        for which in ("trunk", "mtp"):
            with EvalContext(model, n_ctx=64, n_batch=64, n_seq=1, kind=which) as context:
                batch = Batch(context)
                hidden = None if which == "trunk" else np.full(model.n_embd, 0.1, np.float32)
                for place in range(40):
                    batch.add(place, place, 0, output=True, hidden=hidden)
                context.decode(batch)
                assert np.isfinite(context.logits()).all() or which == "mtp"


def outcome(work: Callable[[], None]) -> str:
    """ran, refused, or how a process of its own ended."""
    child = os.fork()
    if child == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            work()
        except (ModelLoadError, LlamaError):
            os._exit(10)
        except BaseException:
            os._exit(11)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return {0: "ran", 10 << 8: "refused", 11 << 8: "raised"}.get(status, f"status {status}")


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_themselves_are_right(files: Files, kind: str) -> None:
    if kind == "tower" and not has_vision():
        pytest.skip("llama.cpp without libmtmd")
    check(files, kind, files.path(kind))
    use(files, kind, files.path(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_types_that_are_no_weights_are_refused(files: Files, kind: str, tmp_path: Path) -> None:
    file = read(files.path(kind))
    wrong = [other for what, other in mutations(file) if what.endswith((" I32", " I16"))]
    assert len(wrong) == 2 * len(file.tensors)
    for number, other in enumerate(wrong):
        path = other.write(tmp_path / "wrong.gguf")
        tensor = file.tensors[number // 2].name
        with pytest.raises(ModelLoadError, match=rf"tensor {tensor} is I(16|32); it must be F32"):
            check(files, kind, path)


def test_a_part_with_such_a_type_is_refused(files: Files, tmp_path: Path) -> None:
    whole = Output(tmp_path / "tiny.gguf", "x")
    whole.path.write_bytes(files.model.read_bytes())
    with StageRecord.locked(tmp_path, "tiny", force=False) as record:
        first, second, *_ = split(whole, 150_000, record)
    file = read(second)
    tensor = file.tensors[0]
    elements = int(np.prod(tensor.shape))
    file.with_tensor(tensor.name, replace(tensor, type=I32, data=bytes(4 * elements))).write(second)
    with pytest.raises(ModelLoadError, match=rf"tensor {tensor.name} is I32"):
        check(files, "model", first)


@pytest.mark.parametrize(
    ("kind", "what", "said"),
    [
        ("model", "without blk.0.attn_qkv.weight", "no tensor blk.0.attn_qkv.weight; .* belongs to layer 0"),
        ("model", "without blk.0.attn_norm.weight", "no tensor blk.0.attn_norm.weight"),
        ("model", "without blk.4.nextn.eh_proj.weight", "the block that predicts further tokens"),
        ("model", "without qwen35.rope.freq_base", "qwen35.rope.freq_base as missing; it must be f32"),
        ("model", "tokenizer.chat_template as i32", "tokenizer.chat_template as i32; it must be string"),
        ("tower", "clip.vision.block_count 1", "tensor v.blk.1.* has no place in a tower of 1 layers"),
        ("tower", "clip.vision.image_mean as i32", r"clip.vision.image_mean as i32; it must be \[f32\]"),
        ("tower", "without v.blk.0.ln1.weight", "there is no tensor v.blk.0.ln1.weight"),
        ("tower", "clip.vision.patch_size 1", "tensor v.patch_embd|image_size"),
        ("tower", "NaN in mm.2.bias", "mm.2.bias holds values that are not finite"),
        ("adapter", "adapter.lora.alpha as bool", "adapter.lora.alpha as bool; it must be f32"),
        ("adapter", "NaN in blk.0.ffn_down.weight.lora_a", "lora_a holds values that are not finite"),
    ],
)
def test_what_is_wrong_is_named(files: Files, kind: str, what: str, said: str, tmp_path: Path) -> None:
    (other,) = [file for name, file in mutations(read(files.path(kind))) if name == what][:1]
    with pytest.raises(ModelLoadError, match=said):
        check(files, kind, other.write(tmp_path / "wrong.gguf"))


@pytest.mark.parametrize("kind", ["model", "tower"])
def test_no_scale_may_be_nan(files: Files, kind: str, nano_q4_k_m: Path, tmp_path: Path) -> None:
    source = nano_q4_k_m if kind == "model" else files.tower
    file = read(source)
    quantized = [one for one in file.tensors if one.type in (12, 14)] or [file.tensors[-1]]
    damaged = b"\xff\x7f\xff\x7f" if kind == "model" else b"\xff\xff\xff\x7f"
    tensor = quantized[0]
    data = bytearray(tensor.data)
    data[: len(damaged)] = damaged
    if tensor.type == 14:  # its scale ends the block
        data[208:210] = damaged[:2]
    path = file.with_tensor(tensor.name, replace(tensor, data=bytes(data))).write(tmp_path / "nan.gguf")
    with pytest.raises(ModelLoadError, match=r"invalid|not finite"):
        if kind == "tower":
            check(files, kind, path)
        else:
            use(files, kind, path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_no_mutation_ends_the_process(files: Files, kind: str, tmp_path: Path) -> None:
    if kind == "tower" and not has_vision():
        pytest.skip("llama.cpp without libmtmd")
    found: dict[str, str] = {}
    for what, other in mutations(read(files.path(kind))):
        path = other.write(tmp_path / "wrong.gguf")
        try:
            check(files, kind, path)
        except ModelLoadError:
            found[what] = "refused"
        else:
            found[what] = outcome(lambda: use(files, kind, path))  # noqa: B023 - it runs here
    assert {what: how for what, how in found.items() if how not in ("ran", "refused")} == {}
    assert sum(how == "refused" for how in found.values()) > 0.8 * len(found)


def test_a_tower_in_the_models_file(files: Files, tmp_path: Path) -> None:
    """As Ollama keeps them; llama.cpp says that the number of tensors is wrong."""
    whole = read(files.model)
    inside = replace(whole.tensors[-1], name="v.patch_embd.weight")
    path = replace(whole, tensors=(*whole.tensors, inside)).write(tmp_path / "both.gguf")
    with pytest.raises(
        ModelLoadError, match=r"has tensor v\.patch_embd\.weight: a model and its vision tower"
    ):
        read_checked(path)


def test_a_layer_of_either_kind_is_needed(tmp_path: Path) -> None:
    """llama.cpp ends the process when it computes a model without recurrent layers."""
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS, mtp=False)
    checkpoint = Checkpoint.open(folder)
    full = replace(checkpoint, config=replace(checkpoint.config, layer_types=("full_attention",) * LAYERS))
    names = ("linear_attn", "self_attn")
    tensors = {}
    for name, stored in checkpoint.tensors.items():
        for layer in range(LAYERS) if f"layers.3.{names[1]}" in name else ():
            tensors[name.replace("layers.3.", f"layers.{layer}.")] = stored
        if names[0] not in name:
            tensors[name] = stored
    full = replace(full, tensors=tensors)
    kept, out = tuple(range(LAYERS)), tmp_path / "full.gguf"
    write_gguf(out, full, Source(folder), plan_tensors(full, "F16", kept), kept, "F16")
    with pytest.raises(ModelLoadError, match="no layer has a recurrent state"):
        read_checked(out)


def test_keys_of_the_tokenizer_that_are_missing(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without eos llama.cpp ends answers at token 11, which is a comma; without pre it splits otherwise."""
    whole = read(files.model)
    for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.pre"):
        whole = whole.with_key(key, None)
    path = whole.write(tmp_path / "less.gguf")
    with Runtime(1, 0).load(files.model) as complete, Runtime(1, 0).load(path) as model:
        assert 11 not in model.eog_ids
        assert model.eog_ids == complete.eog_ids
        assert model.eos in complete.eog_ids
    read_checked(files.model)
    assert not caplog.messages
    read_checked(path)
    assert "there is no tokenizer.ggml.pre" in caplog.text
