"""Result files: one JSON document a run of a verb, with everything needed to judge and to repeat it."""

from datetime import datetime
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.errors import BenchError


class Record(BaseModel):
    """A part of a result file: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ResultFile(Record):
    """What every result file says; a verb's own file adds its settings, every raw run and the summary.

    ``seconds``: wall time of the whole command. ``host`` is the machine of the client, ``card`` the server's.
    """

    format: Literal[1] = 1
    kind: str
    command: list[str]
    url: str
    model: str | None
    started: datetime
    seconds: float
    host: dict[str, str]
    card: str | None
    versions: dict[str, str]
    server: dict[str, str] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write as JSON under a temporary name, then rename."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read and check a result file. Raises BenchError that names the file and the field."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the document"
            raise BenchError(f"{path}: not a {cls.__name__}: {where}: {first['msg']}") from error
