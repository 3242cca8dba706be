"""The search: probe every group, fit the additive model, solve, measure the result."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from qwen_serve.convert.cards import BANDWIDTH
from qwen_serve.convert.compensation import COMPENSATION_VERSION
from qwen_serve.convert.compensation.gains import measure_gains
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.progress import Progress
from qwen_serve.convert.search.groups import Layout, Matrix, Type, read_layout
from qwen_serve.convert.search.law import FLOOR, Sensitivity, fit, left_out_error
from qwen_serve.convert.search.measure import Meter, Reading
from qwen_serve.convert.search.record import Record
from qwen_serve.convert.search.solve import choose
from qwen_serve.convert.search.target import Target, spell_size
from qwen_serve.convert.stages import file_digest, fingerprint
from qwen_serve.llamacpp.evaluation import Runtime

SEARCH_VERSION: Final = 2
"""Raise it when the same model would be measured differently."""

PROBES: Final = 3
"""Number of types at which a group is measured; its law predicts the others."""

DRAFT_WEIGHT: Final = 0.1
"""Weight of the drafts' divergence relative to the answers', since drafts only affect the acceptance."""

HEADER_EXTRA: Final = 1024
"""Most bytes that quantization adds to the header, to name the imatrix."""

CLOSE: Final = 0.9
"""If a recipe exceeds the allowed divergence, it is solved again with this share of it."""


@dataclass(frozen=True)
class Paths:
    """Files of a search: the whole model, the text to measure on, the imatrix, and the record; also the
    calibration text if the file will be compensated."""

    base: Path
    text: Path
    imatrix: Path | None
    record: Path
    compensate_on: Path | None = None


@dataclass(frozen=True)
class Found:
    """A recipe, and the accuracy of its prediction.

    `predicted` is the divergence of the next token by the additive model, without the MTP block. `reading` is
    the divergence measured on the search's text. `shares` are the tensors' parts of the prediction; for
    tensors of the MTP block, of the drafts' divergence.
    """

    types: Mapping[str, Type]
    n_bytes: int
    bits_per_weight: float
    milliseconds: float | None
    predicted: float
    reading: Reading
    shares: Mapping[str, float]
    left_out: float
    probes: int
    tokens: int
    seconds: float

    @property
    def prediction_error(self) -> float:
        """Relative to the measurement."""
        return abs(self.predicted - self.reading.mean) / max(self.reading.mean, FLOOR)


def search(
    paths: Paths, target: Target, *, used_experts: int | None, made_from: str, runtime: Runtime
) -> Found:
    """The types that meet `target` at the least cost, as far as measured.

    Measurements stay in `paths.record` for the same `made_from`. So an interrupted search continues, and a
    search for another target measures only its own recipe.

    Raises:
        ConvertError: no types meet the target; names the nearest possible one.
    """
    layout = read_layout(paths.base, extra=HEADER_EXTRA, used_experts=used_experts)
    with _Search(paths, layout, target, made_from, runtime) as running:
        return running.run()


def limits(layout: Layout, target: Target) -> list[tuple[str, list[list[float]], float]]:
    """(name of the limit, amounts by matrix and type, the most that their sum may be), without divergence."""
    sizes = [[float(m.n_bytes(kind)) for kind in m.types] for m in layout.matrices]
    found = []
    if target.n_bytes is not None:
        found.append(("--target-size", sizes, float(target.n_bytes - layout.fixed)))
    if target.bits_per_weight is not None:
        room = target.bits_per_weight * layout.elements / 8 - layout.fixed_tensors
        found.append(("--target-bpw", sizes, room))
    if target.milliseconds is not None and target.card is not None:
        room = target.milliseconds / 1e3 * BANDWIDTH[target.card] - layout.fixed_read
        found.append(("--target-ms", _read(layout), room))
    return found


def _read(layout: Layout) -> list[list[float]]:
    """Bytes a token reads, by matrix and type."""
    return [[m.read * m.n_bytes(kind) for kind in m.types] for m in layout.matrices]


def milliseconds(layout: Layout, types: Mapping[str, Type], card: str) -> float:
    """A lower bound: the time in which a GPU reads the weights that a token reads."""
    return 1e3 * layout.read_bytes(types) / BANDWIDTH[card]


def check_reach(gguf: Path, target: Target, used_experts: int | None) -> None:
    """Raises ConvertError if a size, bits or time is outside the range that the types allow for this
    model."""
    layout = read_layout(gguf, extra=HEADER_EXTRA, used_experts=used_experts)
    least = {m.name: m.types[0] for m in layout.matrices}
    most = {m.name: m.types[-1] for m in layout.matrices}

    def spell(what: str, types: Mapping[str, Type]) -> str:
        if what == "--target-size":
            return f"{spell_size(layout.file_bytes(types))} ({layout.file_bytes(types):,} bytes)"
        if what == "--target-bpw":
            return f"{layout.bits_per_weight(types):.3f}"
        return f"{milliseconds(layout, types, target.card or ''):.4g} ms on the {target.card}"

    asked = {
        "--target-size": spell_size(target.n_bytes or 0),
        "--target-bpw": f"{target.bits_per_weight}",
        "--target-ms": f"{target.milliseconds}",
    }
    for what, amounts, room in limits(layout, target):
        smallest, largest = sum(min(row) for row in amounts), sum(max(row) for row in amounts)
        if not smallest <= room <= largest:
            side = "below the smallest" if room < smallest else "above the largest"
            raise ConvertError(
                f"{what} {asked[what]}: {side} that this model's types come to; possible are "
                f"{spell(what, least)} to {spell(what, most)}"
            )


class _Search:
    """One search; loads the model at the first measurement."""

    def __init__(
        self, paths: Paths, layout: Layout, target: Target, made_from: str, runtime: Runtime
    ) -> None:
        self._paths, self._layout, self._target, self._runtime = paths, layout, target, runtime
        self._record = Record(paths.record, made_from)
        self._mtp = {m.name for m in layout.matrices if m.mtp}
        self._stack = ExitStack()
        self._open: Meter | None = None

    def __enter__(self) -> _Search:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self) -> Found:
        self._measure_gains()  # it loads a model of its own, so it comes before the meter's
        self._measure_errors()
        laws, left_out = self._fit()
        types, tighter = self._solve(laws), 1.0
        reading = self._measure("recipe", types)
        limit = self._target.divergence
        while limit is not None and reading.mean > limit:
            tighter *= CLOSE * limit / reading.mean
            types = self._solve(laws, tighter)
            reading = self._measure(f"recipe for {tighter:.2f} of the divergence", types)
        layout, card = self._layout, self._target.card
        return Found(
            types=types,
            n_bytes=layout.file_bytes(types),
            bits_per_weight=layout.bits_per_weight(types),
            milliseconds=milliseconds(layout, types, card) if card is not None else None,
            predicted=sum(self._cost(laws, m, types[m.name]) for m in layout.matrices if not m.mtp),
            reading=reading,
            shares={m.name: self._cost(laws, m, types[m.name]) for m in layout.matrices},
            left_out=left_out,
            probes=self._record.count,
            tokens=self._record.tokens,
            seconds=self._record.seconds,
        )

    # measuring

    @property
    def _meter(self) -> Meter:
        if self._open is None:
            paths, start = self._paths, time.monotonic()
            self._open = self._stack.enter_context(
                Meter(paths.base, paths.text, paths.imatrix, self._runtime)
            )
            self._record.tokens = self._open.tokens
            self._record.seconds += time.monotonic() - start
        return self._open

    def _measure_errors(self) -> None:
        missing = [m for m in self._layout.matrices if m.name not in self._record.errors]
        if not missing:
            return
        with Progress("Rounding errors of the types", len(missing), "tensors") as progress:
            for matrix in missing:
                progress.note(matrix.name)
                meter, start = self._meter, time.monotonic()
                self._record.errors[matrix.name] = meter.errors(matrix, matrix.types)
                self._record.seconds += time.monotonic() - start
                self._record.save()
                progress.advance()

    def _measure_gains(self) -> None:
        """Measures the gains on one tensor of each group, for the whole group."""
        paths, record = self._paths, self._record
        if paths.compensate_on is None:
            return
        made_from = fingerprint({"version": COMPENSATION_VERSION, "text": file_digest(paths.compensate_on)})
        if record.gains_from != made_from:
            start, groups = time.monotonic(), self._layout.groups
            found = measure_gains(
                paths.base,
                {matrices[0].name: matrices[0].types for matrices in groups.values()},
                text=paths.compensate_on,
                imatrix=paths.imatrix,
                runtime=self._runtime,
            )
            record.gains = {group: found.get(of[0].name, {}) for group, of in groups.items()}
            record.gains_from = made_from
            record.seconds += time.monotonic() - start
            record.save()

    def _measure(self, what: str, types: Mapping[str, Type]) -> Reading:
        if (known := self._record.reading(types)) is not None:
            return known
        meter, start = self._meter, time.monotonic()
        reading = meter.measure(types, mtp=self._mtp)
        self._record.add(what, types, reading, time.monotonic() - start)
        return reading

    def _measure_all(self, what: str, wanted: Iterable[tuple[str, dict[str, Type]]]) -> None:
        """Measures everything that is not recorded yet, and shows the progress."""
        missing = [(name, types) for name, types in wanted if self._record.reading(types) is None]
        if not missing:
            return
        with Progress(what, len(missing), "probes") as progress:
            for name, types in missing:
                progress.note(name)
                self._measure(name, types)
                progress.advance()

    # the additive model

    def _fit(self) -> tuple[dict[str, Sensitivity], float]:
        """A law for every group from its probes, and the mean error of left-out probes."""
        self._measure_all("Sensitivity", self._probes())
        laws, left_out = {}, []
        for group, matrices in self._layout.groups.items():
            measured = {}
            for kind in probed(matrices[0]):
                reading = self._measure(group, {m.name: kind for m in matrices})
                measured[kind] = probe_value(reading, matrices)
            errors = [self._record.errors[m.name] for m in matrices]
            laws[group] = fit(errors, measured)
            left_out.append(left_out_error(errors, measured))
        return laws, fmean(left_out)

    def _probes(self) -> Iterator[tuple[str, dict[str, Type]]]:
        for group, matrices in self._layout.groups.items():
            for kind in probed(matrices[0]):
                yield f"{group} at {kind.name}", {m.name: kind for m in matrices}

    def _cost(
        self, laws: Mapping[str, Sensitivity], matrix: Matrix, kind: Type, *, compensated: bool = False
    ) -> float:
        gain = self._record.gains.get(matrix.group, {}).get(kind, 1.0) if compensated else 1.0
        return laws[matrix.group].cost(gain * self._record.errors[matrix.name][kind])

    # solving

    def _solve(self, laws: Mapping[str, Sensitivity], tighter: float = 1.0) -> dict[str, Type]:
        """The best types by these laws; `tighter` is a factor on the allowed divergence."""
        layout, target = self._layout, self._target
        # a limit on the divergence is measured with llama.cpp's rounding, in the memory of the model
        compensated = self._paths.compensate_on is not None and target.divergence is None
        divergence = [
            [
                (DRAFT_WEIGHT if m.mtp else 1.0) * self._cost(laws, m, kind, compensated=compensated)
                for kind in m.types
            ]
            for m in layout.matrices
        ]
        bounds = [(amounts, room) for _, amounts, room in limits(layout, target)]
        costs = divergence
        if target.divergence is not None:
            least = sum(min(row) for row in divergence)
            allowed = target.divergence * tighter
            if least > allowed:
                raise ConvertError(
                    f"--target-kld {target.divergence:g}: the least that this model's types come to is about "
                    f"{least:.2g} (every tensor at {layout.matrices[0].types[-1].name})"
                )
            bounds.append((divergence, allowed))
            costs = [[float(m.n_bytes(kind)) for kind in m.types] for m in layout.matrices]
            if target.card is not None:
                costs = _read(layout)
        start = time.monotonic()
        chosen = choose(costs, bounds)
        self._record.seconds += time.monotonic() - start
        if chosen is None:
            asked = target.label.removeprefix("auto-")
            raise ConvertError(f"the targets contradict each other: no types keep to all of {asked}")
        return {m.name: m.types[i] for m, i in zip(layout.matrices, chosen, strict=True)}


def probed(matrix: Matrix) -> list[Type]:
    """The types at which a group is measured, spread evenly from the fewest bits to just below the most."""
    wanted = [Type.Q2_K, Type.Q4_K, Type.Q6_K]
    if all(kind in matrix.types for kind in wanted):
        return wanted
    last = len(matrix.types) - 1
    return [matrix.types[i * last // (PROBES - 1)] for i in range(PROBES)]


def probe_value(reading: Reading, matrices: tuple[Matrix, ...]) -> float:
    """The value that a probe of this group measures."""
    if matrices[0].mtp:
        assert reading.draft is not None, "a probe of the MTP block measures drafts"
        return reading.draft
    return reading.mean
