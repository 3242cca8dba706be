"""A search's measurements, in one JSON file that is replaced after every measurement."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qwen_serve.convert.search.groups import Type
from qwen_serve.convert.search.measure import Reading
from qwen_serve.convert.stages import fingerprint, replacing


class Record:
    """Errors by tensor and type, gains of compensation by group and type, and readings by the tensors' types.

    Measurements of another model, imatrix or text (another `made_from`) are discarded.
    """

    def __init__(self, path: Path, made_from: str) -> None:
        self._path, self._made_from = path, made_from
        self.errors: dict[str, dict[Type, float]] = {}
        self.gains: dict[str, dict[Type, float]] = {}
        self.gains_from = ""
        """Fingerprint of what the gains were measured with."""
        self._readings: dict[str, dict[str, Any]] = {}
        self.seconds = 0.0
        """Seconds spent on loading the model, measuring and solving, over all runs."""
        self.tokens = 0
        """Tokens that every probe reads."""
        try:
            data = _read(path)
            if data["made_from"] == made_from:
                self.errors = _typed(data["errors"])
                self.gains, self.gains_from = _typed(data.get("gains", {})), data.get("gains_from", "")
                self._readings = data["readings"]
                self.seconds, self.tokens = data["seconds"], data["tokens"]
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            pass  # a missing or unreadable record counts as empty

    @property
    def count(self) -> int:
        """Readings so far."""
        return len(self._readings)

    def reading(self, types: Mapping[str, Type]) -> Reading | None:
        """The reading with these tensors at these types, if there is one."""
        found = self._readings.get(_key(types))
        return Reading(**found["reading"]) if found else None

    def add(self, what: str, types: Mapping[str, Type], reading: Reading, seconds: float) -> None:
        """`what`: a description for readers of the file."""
        self._readings[_key(types)] = {"what": what, "reading": asdict(reading)}
        self.seconds += seconds
        self.save()

    def save(self) -> None:
        data = {
            "made_from": self._made_from,
            "seconds": round(self.seconds, 3),
            "tokens": self.tokens,
            "errors": _named(self.errors),
            "gains": _named(self.gains),
            "gains_from": self.gains_from,
            "readings": self._readings,
        }
        with replacing(self._path) as part:
            part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def is_record(path: Path) -> bool:
    """Whether the file is a search's record."""
    try:
        data = _read(path)
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and {"made_from", "errors", "readings"} <= data.keys()


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _typed(data: Mapping[str, Mapping[str, float]]) -> dict[str, dict[Type, float]]:
    return {name: {getattr(Type, kind): x for kind, x in of.items()} for name, of in data.items()}


def _named(found: Mapping[str, Mapping[Type, float]]) -> dict[str, dict[str, float]]:
    return {name: {kind.name: x for kind, x in of.items()} for name, of in found.items()}


def _key(types: Mapping[str, Type]) -> str:
    return fingerprint({name: kind.name for name, kind in types.items()})
