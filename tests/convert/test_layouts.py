"""Layouts and files that publishers and tools write, and what is said of damaged ones."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from qwen_serve.convert.checkpoint import INDEX, Checkpoint, read_tensors
from qwen_serve.convert.errors import CheckpointError, ConvertError
from qwen_serve.convert.floats import to_f32
from qwen_serve.convert.gguf_file import write_gguf
from qwen_serve.convert.safetensors import write_file
from qwen_serve.convert.source import Source
from qwen_serve.convert.tensors import plan_tensors
from qwen_serve.convert.vocab import Vocab
from qwen_serve.llamacpp.vision import has_vision
from qwen_serve.server.settings import find_mmproj
from tests.checkpoints import TEMPLATE, edit_json, write_checkpoint

LAYERS = 4


def made(folder: Path) -> bytes:
    """The GGUF."""
    checkpoint, kept = Checkpoint.open(folder), tuple(range(LAYERS))
    out = folder.parent / "out.gguf"
    write_gguf(out, checkpoint, Source(folder), plan_tensors(checkpoint, "F16", kept), kept, "F16")
    return out.read_bytes()


def rewritten(folder: Path, rename: dict[str, str], dtype: str | None = None) -> None:
    """Every tensor under another name or in another type, in one file."""
    parts = []
    for name, tensor in read_tensors(folder).items():
        new = next((to + name.removeprefix(old) for old, to in rename.items() if name.startswith(old)), name)
        values = tensor.read().reshape(tensor.shape)
        wide = to_f32(values, tensor.dtype).astype(np.float64) if dtype == "F64" else values
        parts.append((new, dtype or tensor.dtype, wide))
    for path in (folder / INDEX, *folder.glob("*.safetensors")):
        path.unlink()
    write_file(folder / "model.safetensors", parts, {"format": "pt"})


@pytest.mark.parametrize(
    ("rename", "dtype"),
    [
        ({"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}, None),
        ({"mtp.": "model.mtp."}, None),
        ({"mtp.": "model.language_model.mtp.", "model.visual.": "visual."}, None),
        ({}, "F64"),
    ],
)
def test_other_names_and_types_give_the_same_file(
    tmp_path: Path, rename: dict[str, str], dtype: str | None
) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS, tied=False, dtype="F32")
    before = made(folder)
    rewritten(folder, rename, dtype)
    assert made(folder) == before


def test_shards_without_an_index(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS)
    before = made(folder)
    (folder / INDEX).unlink()
    assert made(folder) == before
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="1 of 2 shards are there"):
        Checkpoint.open(folder)


def test_files_with_a_byte_order_mark(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS)
    before = made(folder)
    for path in folder.glob("*.json"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert made(folder) == before


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/x.safetensors", 5, "model.bin"])
def test_nothing_outside_the_folder_is_opened(tmp_path: Path, name: object) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS)
    (tmp_path / "other.safetensors").write_bytes(b"")
    edit_json(folder / INDEX, weight_map={"model.language_model.norm.weight": name})
    with pytest.raises(CheckpointError, match=r"weight_map has .* for model\..*norm\.weight; want"):
        Checkpoint.open(folder)


def test_the_template_of_its_own_file_is_transformers_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS)
    config = Checkpoint.open(folder).config
    assert Vocab.load(folder, config).chat_template == TEMPLATE
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    assert Vocab.load(folder, config).chat_template == TEMPLATE
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert Vocab.load(folder, config).chat_template == TEMPLATE
    assert capsys.readouterr().err == ""
    (folder / "chat_template.jinja").write_text("own")
    assert Vocab.load(folder, config).chat_template == "own"
    assert "different chat templates; chat_template.jinja's is taken" in capsys.readouterr().err
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    named = [{"name": "default", "template": "own"}, {"name": "tool_use", "template": "tools"}]
    assert Vocab.load(folder, config).chat_template == named
    before = Checkpoint.open(folder).fingerprint()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("others")
    assert Checkpoint.open(folder).fingerprint() != before


def test_the_template_of_older_processors(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS)
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    assert Vocab.load(folder, Checkpoint.open(folder).config).chat_template == "old"


def test_damaged_texts_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS)
    (folder / "README.md").write_text("---\nlicense: [mit\nx: : y\n---\n")
    with pytest.raises(ConvertError, match=r"README\.md: its front matter is not a YAML mapping"):
        made(folder)
    (folder / "README.md").unlink()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    nameless = [{"content": "<|x|>", "special": True}, *tokenizer["added_tokens"]]
    edit_json(folder / "tokenizer.json", added_tokens=nameless)
    with pytest.raises(ConvertError, match=r"added_tokens: each token must have an id and content"):
        made(folder)
    edit_json(folder / "tokenizer.json", added_tokens=tokenizer["added_tokens"])
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(ConvertError, match=r"chat_template\.jinja: is not UTF-8"):
        made(folder)


def test_an_mtp_head_that_is_announced_and_absent(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS, mtp=False)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    edit_json(folder / "config.json", **config)
    (remark,) = Checkpoint.open(folder).config.remarks
    assert "no tensors mtp.*: the head that drafts is left out" in remark


def test_a_tower_that_is_named_by_its_type_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ("Qwen3.5-4B-Q4_K_M", "Qwen3.5-4B-UD-Q4_K_XL", "mmproj-BF16", "mmproj-F16", "mmproj-F32")
    for name in names:
        (tmp_path / f"{name}.gguf").touch()
    model = tmp_path / "Qwen3.5-4B-Q4_K_M.gguf"
    with caplog.at_level(logging.WARNING):
        assert find_mmproj(model) == (tmp_path / "mmproj-F16.gguf" if has_vision() else None)
    (tmp_path / "Other-9B-Q4_K_M.gguf").touch()
    assert find_mmproj(model) is None
