"""The file of a record: measurements, hardware, versions, and no personal data.

Strings are names of GPUs, processors, versions and workloads. None may contain a slash, a backslash or an
e-mail address, so that no path or URL is published. docs/results/community/schema.json is the schema of the
repository's copies.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qwen_serve.bench.errors import BenchError, first_problem
from qwen_serve.bench.metrics import METRICS
from qwen_serve.bench.report.publish import summarize
from qwen_serve.bench.store import Results

MOST_BYTES = 200_000
"""Maximum size of the file, in bytes."""

KEPT = (
    *("latency", "ttft", "itl", "output_rate", "total_rate", "request_rate", "failed", "spot_checks_failed"),
    *("ms_per_token", "start_time", "drafted_tokens", "accepted_tokens"),
    *("score", "score_low", "score_high", "threshold", "baseline", "items", "items_in_all"),
    *("cut_answers", "cut_thinking", "empty_answers"),
)
"""The store's metrics that the file includes."""

Plain = Annotated[str, Field(max_length=120, pattern=r"^[^/\\\\]*$")]
State = Literal["finished", "missing"]
MetricName = Annotated[str, Field(json_schema_extra={"enum": list(KEPT)})]


class Part(BaseModel):
    """Part of a record: strict, and without unknown fields."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Model(Part):
    """The GGUF that was served."""

    file: Plain
    bytes: int = Field(gt=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Machine(Part):
    """``card``: the GPU; None if the model ran on the CPU. ``system``: the kernel's name and the C
    library."""

    card: Plain | None
    driver: Plain | None
    processor: Plain
    cores: int = Field(ge=1)
    memory: Plain
    system: Plain


class Spread(Part):
    """A distribution of values over time."""

    p10: float
    p50: float
    p90: float


class Clocks(Part):
    """nvidia-smi's values while the GPU was busy: ``sm`` and ``memory`` in MHz, ``power`` in W,
    ``temperature`` in degrees Celsius. ``sm_most``, ``memory_most`` and ``power_limit``: the GPU's limits;
    None if it does not report them."""

    samples: int = Field(ge=1)
    sm: Spread
    memory: Spread
    power: Spread
    temperature: Spread
    sm_most: float | None
    memory_most: float | None
    power_limit: float | None


class Row(Part):
    """The distribution of a metric of one cell, over rounds and requests."""

    part: Plain
    workload: Plain
    cell: Plain
    metric: MetricName
    rounds: int = Field(ge=1)
    values: int = Field(ge=1)
    p10: float
    p50: float
    p90: float


class Record(Part):
    """``quick``: made with --quick, so figures do not count. ``parts``: the finished measurements. ``rows``:
    their results."""

    format: Literal[1] = 1
    made: date
    quick: bool
    model: Model
    machine: Machine
    versions: dict[Plain, Plain]
    commit: Annotated[str, Field(pattern=r"^[\w.-]{4,80}$")] | None
    clocks: Clocks | None
    parts: dict[Plain, State]
    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Raises BenchError if it is too large or invalid; the message names the field."""
        data = path.read_bytes()
        if len(data) > MOST_BYTES:
            raise BenchError(f"{path}: {len(data):,} bytes; want at most {MOST_BYTES:,}")
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise BenchError(f"{path}: {first_problem(error, 'the record')}") from error

    def text(self) -> str:
        """The file's text. Raises BenchError if it is too large."""
        rows = ",\n".join(f"  {json.dumps(row)}" for row in self.model_dump(mode="json")["rows"])
        head = json.dumps(self.model_dump(mode="json", exclude={"rows"}), indent=1)
        made = head.removesuffix("\n}") + f',\n "rows": [\n{rows}\n ]\n}}\n'
        if len(made.encode()) > MOST_BYTES:
            raise BenchError(f"the record has {len(made.encode()):,} bytes; want at most {MOST_BYTES:,}")
        return made


def rows_of(part: str, results: Results) -> Iterable[Row]:
    """The file's rows for one run."""
    frame = results.frame
    summary = summarize(frame[frame["metric"].isin(KEPT)])
    for one in summary.itertuples():
        spread = {name: float(f"{getattr(one, name):.6g}") for name in ("p10", "p50", "p90")}
        named = {"workload": one.workload, "cell": one.cell, "metric": one.metric}
        yield Row(part=part, rounds=one.rounds, values=one.values, **named, **spread)


def schema() -> dict[str, Any]:
    """The file's JSON Schema, as in the repository."""
    made = Record.model_json_schema()
    assert set(KEPT) <= METRICS.keys()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def plain(text: str) -> str:
    """The name of a GPU or a processor, without characters that the file does not allow."""
    return text.replace("/", " ").replace("\\", " ")[:120]


def plain_versions(versions: Mapping[str, str]) -> dict[str, str]:
    """Versions of packages, without characters that the file does not allow."""
    return {name: plain(version) for name, version in versions.items()}
