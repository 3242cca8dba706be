"""One experiment on record: what changed, what stayed, what came out, and where each figure is read from."""

import json
import math
import os
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, Field, FiniteFloat, model_validator

from bench.errors import BenchError
from bench.figures import read_document
from bench.results import Record

Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=80)]
Direction = Literal["lower", "higher"]

CONDITION = re.compile(r"\[([^=\]]+)=([^\]]*)\]")
TOLERANCE = 1e-9


class Source(Record):
    """Where a figure is read from: the mean of what ``path`` finds in ``file``, times ``scale``.

    ``file`` is relative to the folder of the records. ``path`` is a JSON pointer (RFC 6901) in which ``*``
    stands for every element and ``[key=value]`` (several: ``[a=x][b=y]``) for those elements of a list that
    have these values.
    """

    file: Text
    path: Annotated[str, Field(pattern="^/")]
    scale: FiniteFloat = 1.0

    def read(self, folder: Path) -> float:
        """The figure. Raises BenchError: the file is no JSON, or holds no numbers there."""
        path = Path(os.path.normpath(folder / self.file))
        found = list(_find(read_document(path), self.path.split("/")[1:]))
        numbers = [one for one in found if isinstance(one, int | float) and not isinstance(one, bool)]
        if not numbers or len(numbers) < len(found):
            raise BenchError(f"{path}: {self.path} finds {json.dumps(found)[:80]}; numbers are needed")
        return self.scale * sum(numbers) / len(numbers)


class Figure(Record):
    """A measured value. ``source`` is None only for what no result file holds."""

    value: FiniteFloat
    unit: Text
    better: Direction
    source: Source | None = None

    def check(self, folder: Path) -> None:
        """Raises BenchError if the source has another value, or none."""
        if self.source is None:
            return
        found = self.source.read(folder)
        if not math.isclose(found, self.value, rel_tol=TOLERANCE):
            raise BenchError(f"value {self.value} is not what {self.source.file} holds: {found}")

    def improves_on(self, other: float) -> bool:
        """Whether this value is better than ``other``."""
        return self.value < other if self.better == "lower" else self.value > other


class Experiment(Record):
    """A record of the history. ``date`` is when it was measured; ``card`` says so where there was none.

    ``changed`` is against ``parent`` (or says what this beginning is), ``fixed`` what is the same in both.
    ``risky`` figures may not hold elsewhere, for the reasons in ``risks``. ``parent_digest`` is the parent's
    `digest`, so that a record with descendants cannot be changed unnoticed.
    """

    format: Literal[1] = 1
    name: Name
    date: AwareDatetime
    changed: Text
    fixed: Annotated[dict[Text, Text], Field(min_length=1)]
    figures: Annotated[dict[Text, Figure], Field(min_length=1)]
    validity: Literal["valid", "risky"]
    risks: list[Text] = Field(default_factory=list)
    parent: Name | None = None
    parent_digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    command: Annotated[list[Text], Field(min_length=1)]
    card: Text
    versions: dict[str, str] = Field(default_factory=dict)
    notes: list[Text] = Field(default_factory=list)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.validity == "risky") != bool(self.risks):
            raise ValueError("validity is risky if and only if risks are named")
        if (self.parent is None) != (self.parent_digest is None):
            raise ValueError("parent and parent_digest come together")
        return self

    def to_json(self) -> str:
        """The file's content."""
        return self.model_dump_json(indent=1) + "\n"


def digest(text: str) -> str:
    """sha256 of a record's JSON, whatever its white space and the order of its keys."""
    canonical = json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return sha256(canonical.encode()).hexdigest()


def schema() -> str:
    """The JSON schema of a record, as a file's content."""
    return json.dumps(Experiment.model_json_schema(), indent=1) + "\n"


def _find(value: Any, steps: list[str]) -> Iterator[Any]:
    """Everything that the steps of a path lead to."""
    if not steps:
        yield value
        return
    step, rest = steps[0].replace("~1", "/").replace("~0", "~"), steps[1:]
    conditions = CONDITION.findall(step)
    if isinstance(value, list) and (step == "*" or conditions):
        for item in value:
            if step == "*" or all(str(_get(item, key)) == wanted for key, wanted in conditions):
                yield from _find(item, rest)
    elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
        yield from _find(value[int(step)], rest)
    elif isinstance(value, dict) and step == "*":
        for item in value.values():
            yield from _find(item, rest)
    elif isinstance(value, dict) and step in value:
        yield from _find(value[step], rest)


def _get(item: Any, key: str) -> Any:
    return item.get(key) if isinstance(item, dict) else None
