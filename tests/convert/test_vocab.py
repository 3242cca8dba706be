"""The tokenizer's keys in the GGUF."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType

from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.config import ModelConfig
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.vocab import Vocab
from tests.checkpoints import TEMPLATE, VOCAB, edit_json, model_config

CONFIG = ModelConfig.from_json(model_config())


@pytest.fixture
def folder(checkpoint: Path) -> Path:
    return checkpoint


def test_tokens_are_padded_to_the_embedding(folder: Path) -> None:
    vocab = Vocab.load(folder, CONFIG)
    assert len(vocab.tokens) == len(vocab.types) == VOCAB
    assert vocab.tokens[256:259] == ["th", "the", "Ġthe"]
    assert vocab.tokens[265] == "[PAD265]"
    assert set(vocab.types[265:]) == {TokenType.UNUSED}


def test_token_types(folder: Path) -> None:
    vocab = Vocab.load(folder, CONFIG)
    types = dict(zip(vocab.tokens, vocab.types, strict=True))
    assert types["the"] == TokenType.NORMAL
    assert types["<|im_end|>"] == TokenType.CONTROL
    assert types["<think>"] == TokenType.USER_DEFINED
    assert types["<|looks_special|>"] == TokenType.CONTROL  # whatever its flag says


def test_special_ids_flags_template_and_pre_tokenizer(folder: Path) -> None:
    vocab = Vocab.load(folder, CONFIG)
    assert vocab.special_ids == {"eos": 261, "pad": 259}  # the tokenizer's, not config.json's 259
    assert vocab.add_special == {"bos": False, "eos": False}
    assert vocab.chat_template == TEMPLATE
    assert vocab.pre_tokenizer == "qwen35"


def test_special_ids_fall_back_to_the_config(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    assert Vocab.load(folder, CONFIG).special_ids["eos"] == 259


@pytest.mark.parametrize("merges", [["t h", "Ġ the"], [["t", "h"], ["Ġ", "the"]], [["t", "h"], [" ", "the"]]])
def test_both_ways_to_write_merges(folder: Path, merges: list[Any]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    edit_json(folder / "tokenizer.json", model=tokenizer["model"] | {"merges": merges})
    assert Vocab.load(folder, CONFIG).merges == ["t h", "Ġ the"]


def test_the_template_may_lie_in_a_file(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").write_text("from the file")
    assert Vocab.load(folder, CONFIG).chat_template == "from the file"


def test_an_unknown_pre_tokenizer_is_refused(folder: Path) -> None:
    pre_tokenizer = {"type": "Split", "pattern": {"Regex": r"\w+"}, "behavior": "Isolated", "invert": False}
    edit_json(folder / "tokenizer.json", pre_tokenizer=pre_tokenizer)
    with pytest.raises(CheckpointError, match=r"(?s)no pre-tokenizer that splits by.*\\w\+.*qwen35: "):
        Vocab.load(folder, CONFIG)


def test_ids_beyond_the_embedding_are_refused(folder: Path) -> None:
    small = ModelConfig.from_json(model_config(vocab_size=258))
    with pytest.raises(CheckpointError, match=r"token id 258 has no row .*vocab_size is 258"):
        Vocab.load(folder, small)


def test_one_text_for_two_ids_is_refused(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    think = settings["added_tokens_decoder"]["262"]
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder={"300": think})
    with pytest.raises(CheckpointError, match=r"ids 262 and 300 are both '<think>'; do tokenizer\.json"):
        Vocab.load(folder, CONFIG)


def test_another_kind_of_tokenizer_is_refused(folder: Path) -> None:
    edit_json(folder / "tokenizer.json", model={"type": "Unigram"})
    with pytest.raises(CheckpointError, match=r"model\.type must be BPE, got 'Unigram'"):
        Vocab.load(folder, CONFIG)


def sequence(name: str) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": 0}}


def special(token: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": 0}}


def template(*single: dict[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": list(single), "pair": [], "special_tokens": {}}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


@pytest.mark.parametrize(
    ("post_processor", "bos", "eos"),
    [
        (template(sequence("A")), False, False),  # what transformers 5 saves
        ({"type": "Sequence", "processors": [BYTE_LEVEL, template(sequence("A"))]}, False, False),
        (template(special("<|endoftext|>"), sequence("A")), True, False),
        (template(sequence("A"), special("<|im_end|>")), False, True),
        (template(special("<|endoftext|>"), sequence("A"), special("<|im_end|>")), True, True),
    ],
)
def test_templates_that_frame_the_text(
    folder: Path, post_processor: dict[str, Any], bos: bool, eos: bool
) -> None:
    edit_json(folder / "tokenizer.json", post_processor=post_processor)
    edit_json(folder / "tokenizer_config.json", bos_token="<|endoftext|>", eos_token="<|im_end|>")
    assert Vocab.load(folder, CONFIG).add_special == {"bos": bos, "eos": eos}


@pytest.mark.parametrize(
    ("post_processor", "message"),
    [
        (template(special("<think>"), sequence("A")), "adds <think> before the text, which is not bos"),
        (template(sequence("A"), special("<think>")), "adds <think> after the text, which is not eos"),
        (
            template(special("<|endoftext|>"), special("<think>"), sequence("A")),
            r"adds <\|endoftext\|> <think> before the text",
        ),
        (template(sequence("B")), "does not hold the text once"),
        ({"type": "RobertaProcessing"}, "ByteLevel or TemplateProcessing, got RobertaProcessing"),
    ],
)
def test_templates_that_llama_cpp_cannot_follow(
    folder: Path, post_processor: dict[str, Any], message: str
) -> None:
    edit_json(folder / "tokenizer.json", post_processor=post_processor)
    edit_json(folder / "tokenizer_config.json", bos_token="<|endoftext|>", eos_token="<|im_end|>")
    with pytest.raises(CheckpointError, match=message):
        Vocab.load(folder, CONFIG)


@pytest.mark.parametrize("entry", [["a"], ["a", "b", "c"], "ab", 7, ["a", 1], None])
def test_a_malformed_merge_is_named(checkpoint: Path, entry: object) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].append(entry)
    edit_json(checkpoint / "tokenizer.json", **tokenizer)
    with pytest.raises(CheckpointError, match=r"model\.merges must hold pairs of texts, got"):
        Vocab.load(checkpoint, Checkpoint.open(checkpoint).config)


@pytest.mark.parametrize("place", ["merges", "vocab"])
def test_half_a_surrogate_pair_is_named(checkpoint: Path, place: str) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    if place == "merges":
        tokenizer["model"]["merges"].append(["a", "\ud800"])
    else:
        tokenizer["model"]["vocab"]["\ud800"] = 300
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=rf"model\.{place}: .* half of a surrogate pair"):
        Vocab.load(checkpoint, Checkpoint.open(checkpoint).config)
