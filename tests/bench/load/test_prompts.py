"""Prompts have the exact requested length, and all are different."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.client import Client
from qwen_serve.bench.load.prompts import NaturalPrompts, RandomPrompts, TextPrompts, find_prompts, prose
from qwen_serve.bench.load.vocabulary import (
    GgufVocabulary,
    HuggingFaceVocabulary,
    ServerVocabulary,
    Vocabulary,
    find_vocabulary,
)
from tests.bench.fake_server import VOCABULARY, FakeServer, Script

NANO = Path(__file__).parents[3] / "models" / "nano"
LENGTHS = (1, 7, 64, 500)


def nano() -> HuggingFaceVocabulary:
    """nano's vocabulary, in which the texts of random tokens may merge into other tokens."""
    return HuggingFaceVocabulary(str(NANO))


@pytest.mark.parametrize("words", [True, False])
async def test_random_prompts_hold_their_length(words: bool) -> None:
    vocabulary, rng = nano(), random.Random(2)
    prompts = await RandomPrompts.build(vocabulary, random.Random(1), words=words)
    made = [await prompts.make(length, rng) for length in LENGTHS for _ in range(5)]
    assert [await vocabulary.count(text) for text in made] == [n for n in LENGTHS for _ in range(5)]
    assert len(set(made[5:])) == len(made) - 5
    assert not any("<|" in text for text in made)


class Bytes(Vocabulary):
    """A vocabulary in which each byte is a token, and some tokens decode to a character of three bytes."""

    source = "bytes"
    size = 128

    async def encode(self, text: str) -> list[int]:
        return list(text.encode())

    async def decode(self, ids: Sequence[int]) -> str:
        pieces = ("€".encode() if 100 <= i < 128 else bytes([i]) for i in ids)
        return b"".join(pieces).decode("utf-8", "replace")


async def test_a_character_that_the_length_would_cut_is_replaced() -> None:
    prompts = await RandomPrompts.build(Bytes(), random.Random(1), words=False)
    rng = random.Random(2)
    made = [await prompts.make(64, rng) for _ in range(100)]
    assert {len(text.encode()) for text in made} == {64}
    assert not any("\ufffd" in text for text in made)


async def test_a_seed_makes_the_same_prompts() -> None:
    made = []
    for _ in range(2):
        prompts = await RandomPrompts.build(nano(), random.Random(5), words=True)
        rng = random.Random(6)
        made.append([await prompts.make(50, rng) for _ in range(3)])
        natural, rng = NaturalPrompts(Bytes()), random.Random(6)
        made[-1] += [await natural.make(50, rng) for _ in range(3)]
    assert made[0] == made[1]
    assert len(set(made[0])) == 6


async def test_natural_text(nano_f16: Path) -> None:
    vocabulary = GgufVocabulary(nano_f16)
    prompts = NaturalPrompts(vocabulary)
    made = [await prompts.make(tokens, random.Random(number)) for number in range(5) for tokens in (64, 2048)]
    assert [await vocabulary.count(text) for text in made] == [64, 2048] * 5
    assert len({text[:40] for text in made}) == 5, "each begins with another paragraph"
    assert made[0].split(". ")[0] in " ".join(prose()), "sentences as they were written"
    assert await vocabulary.count(await prompts.make(100_000, random.Random(1))) == 100_000


async def test_slices_of_a_text(tmp_path: Path) -> None:
    vocabulary, file = nano(), tmp_path / "text.txt"
    file.write_text("".join(f" word{'abcdefghij'[n % 10]}" for n in range(1000)))
    prompts = await TextPrompts.build(vocabulary, file)
    rng = random.Random(1)
    first, second = await prompts.make(300, rng), await prompts.make(300, rng)
    assert await vocabulary.count(first) == await vocabulary.count(second) == 300
    with pytest.raises(BenchError, match="used up"):
        for _ in range(5):
            await prompts.make(300, rng)


async def test_without_a_tokenizer_there_are_no_made_up_prompts() -> None:
    with FakeServer(Script(tokenizer=None)) as server:
        async with Client(server.url) as client:
            vocabulary = await find_vocabulary(None, client, None)
    assert vocabulary is None
    with pytest.raises(BenchError, match="name one with --tokenizer"):
        await find_prompts(vocabulary, kind="natural", seed=1)


@pytest.mark.parametrize("dialect", ["llama-server", "vLLM"])
async def test_the_servers_own_tokenizer(dialect: str) -> None:
    with FakeServer(Script(tokenizer=dialect)) as server:
        async with Client(server.url) as client:
            vocabulary = await ServerVocabulary.find(client, "fake")
            assert vocabulary is not None
            assert dialect in vocabulary.source
            assert vocabulary.size == VOCABULARY
            ids = await vocabulary.encode("water wood 12")
            assert await vocabulary.decode(ids) == "water wood 12"


async def test_a_tokenizer_json_and_a_gguf_count_alike(nano_f16: Path) -> None:
    from_gguf = GgufVocabulary(nano_f16)
    from_json = nano()
    for text in (
        "The quick brown fox jumps over the lazy dog. " * 3,
        "What is 17+25?\n<think>",
        "Zürich 東京",
    ):
        assert await from_gguf.encode(text) == await from_json.encode(text)
        assert await from_gguf.decode(await from_gguf.encode(text)) == text
        assert await from_json.decode(await from_json.encode(text)) == text


@pytest.mark.parametrize("name", ["/no/such/file.gguf", "/no/such/tokenizer.json"])
async def test_no_such_tokenizer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    async with Client("http://127.0.0.1:9") as client:
        with pytest.raises(BenchError, match="--tokenizer"):
            await find_vocabulary(name, client, None)
