"""Counts tokens with the model's tokenizer from a file, with the server's endpoints, or from the server's
usage.

An independent count is more reliable than the server's own, so results name the source (`source`).
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qwen_serve.bench.errors import BenchError, ServerError
from qwen_serve.bench.load.client import Client

PROBE = "The quick brown fox"


class Vocabulary(ABC):
    """Converts text to token ids and back. ``size``: all ids are below it; ``source``: the vocabulary's
    origin.
    """

    source: str
    size: int

    @abstractmethod
    async def encode(self, text: str) -> list[int]:
        """The ids of ``text``. Special tokens are parsed, and none are added."""

    @abstractmethod
    async def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD."""

    async def count(self, text: str) -> int:
        """Number of tokens of ``text``."""
        return len(await self.encode(text))


class GgufVocabulary(Vocabulary):
    """The vocabulary of a GGUF file, through llama.cpp; weights are not loaded."""

    def __init__(self, path: Path) -> None:
        from qwen_serve.llamacpp import Model
        from qwen_serve.llamacpp.errors import ModelLoadError

        if not path.is_file():
            raise BenchError(f"--tokenizer {path}: no such file")
        self.source = str(path)
        try:
            self._model = Model(path, n_gpu_layers=0, no_alloc=True)
        except ModelLoadError as error:
            raise BenchError(f"--tokenizer {path}: llama.cpp cannot read its vocabulary: {error}") from error
        self.size = self._model.n_vocab

    async def encode(self, text: str) -> list[int]:
        return self._model.tokenize(text)

    async def decode(self, ids: Sequence[int]) -> str:
        return self._model.detokenize(ids).decode("utf-8", "replace")


class HuggingFaceVocabulary(Vocabulary):
    """A ``tokenizer.json`` in a local folder or on the hub."""

    def __init__(self, name: str) -> None:
        from tokenizers import Tokenizer

        self.source = name
        file = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
        try:
            self._tokenizer = (
                Tokenizer.from_file(str(file)) if file.exists() else Tokenizer.from_pretrained(name)
            )
        except Exception as error:  # the bindings raise plain Exception
            raise BenchError(
                f"--tokenizer {name}: want a .gguf, a folder with tokenizer.json, or a hub id: {error}"
            ) from error
        self.size = self._tokenizer.get_vocab_size()

    async def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    async def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


DIALECTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama-server": ("content", {"add_special": False, "parse_special": True}),
    "vLLM": ("prompt", {"add_special_tokens": False}),
}
"""For each kind of server: the field of /tokenize with the text, the field of /detokenize's answer, and other
fields of /tokenize."""


class ServerVocabulary(Vocabulary):
    """The server's tokenizer, over HTTP. Make one with `find`."""

    def __init__(self, client: Client, dialect: str, model: str | None) -> None:
        self.source = f"/tokenize of the server ({dialect}'s form)"
        self._client = client
        self._field, flags = DIALECTS[dialect]
        self._common = {**flags, **({"model": model} if model else {})}

    @classmethod
    async def find(cls, client: Client, model: str | None) -> "ServerVocabulary | None":
        """Try each of `DIALECTS`. None if the server has no tokenizer endpoints."""
        for dialect in DIALECTS:
            vocabulary = cls(client, dialect, model)
            try:
                if await vocabulary.decode(await vocabulary.encode(PROBE)) == PROBE:
                    vocabulary.size = await vocabulary._find_size()
                    return vocabulary
            except ServerError:
                continue
        return None

    async def encode(self, text: str) -> list[int]:
        ids = (await self._ask("/tokenize", {self._field: text})).get("tokens")
        if not isinstance(ids, list) or bool(ids) != bool(text) or not all(type(one) is int for one in ids):
            raise ServerError("/tokenize: no token ids in the answer", 200)
        return ids

    async def decode(self, ids: Sequence[int]) -> str:
        text = (await self._ask("/detokenize", {"tokens": list(ids)})).get(self._field)
        if not isinstance(text, str):
            raise ServerError("/detokenize: no text in the answer", 200)
        return text

    async def _ask(self, path: str, body: dict[str, Any]) -> Mapping[str, Any]:
        reply = await self._client.request("POST", path, body={**self._common, **body})
        if reply.status != 200:
            raise ServerError(f"POST {path} answered {reply.status}", reply.status)
        answer = reply.json()
        if not isinstance(answer, dict):
            raise ServerError(f"POST {path}: the answer is not an object", 200)
        return answer

    async def _find_size(self) -> int:
        """The size in /v1/models; else the first power of two that is no token, since an upper bound
        suffices.
        """
        reply = await self._client.request("GET", "/v1/models")
        try:
            return int(json.loads(reply.text)["data"][0]["meta"]["n_vocab"])
        except (ValueError, LookupError, TypeError):
            pass
        for power in range(8, 20):
            try:
                if not await self.decode([2**power]):
                    return int(2**power)
            except ServerError:
                return int(2**power)
        return 2**20


async def find_vocabulary(name: str | None, client: Client, model: str | None) -> Vocabulary | None:
    """The tokenizer that --tokenizer names, else the server's; None if there is neither."""
    if name is None:
        return await ServerVocabulary.find(client, model)
    return GgufVocabulary(Path(name)) if name.endswith(".gguf") else HuggingFaceVocabulary(name)
