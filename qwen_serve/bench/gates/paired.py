"""``qwen-bench quality paired``: compares two models' answers to the same items, item by item."""

from pathlib import Path

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.gates.estimate import Paired, estimate
from qwen_serve.bench.gates.samples import Sample, read_samples
from qwen_serve.bench.report.sweep import ALL_GATES
from qwen_serve.bench.terminal import Cell, Table


def paired(first: Path, second: Path, /) -> int:
    """Compare two models item by item: the items that only the first got right, and those that only the
    second did.

    - `qwen-bench quality paired results/RUN-A/samples.jsonl results/RUN-B/samples.jsonl`

    An item with several outcomes (IFEval's instructions) counts for the model with more right ones. p is the
    probability that two equally good models differ by at least as much (McNemar's exact test). It applies to
    a single gate: of twenty gates, one is below 0.05 by chance.

    Parameters
    ----------
    first
        Replies of the first model: samples.jsonl in a run of `quality`, NAME.samples.jsonl in a run of
        `sweep`.
    second
        Replies of the second model to the same items.
    """
    answers = [{(one.gate, one.task, one.id): one for one in read_samples(path)} for path in (first, second)]
    shared = [key for key in answers[0] if key in answers[1]]
    if not shared:
        raise BenchError(f"{first} and {second}: no item that both were asked")
    table(first.name, second.name, [(answers[0][key], answers[1][key]) for key in shared]).print()
    return 0


def table(first: str, second: str, pairs: list[tuple[Sample, Sample]]) -> Table:
    """A table with a row for each gate: both scores, the items that only one model got right, and p."""
    gates = list(dict.fromkeys(one.gate for one, _ in pairs))
    rows = [_row(gate, [pair for pair in pairs if pair[0].gate == gate]) for gate in gates]
    if len(gates) > 1:
        together = Paired.of((two.outcomes, one.outcomes) for one, two in pairs)
        rows.append([ALL_GATES, len(pairs), None, None, *_counts(together)])
    header = ["gate", "items", "first %", "second %", "first alone", "second alone", "p", ""]
    return Table(header, rows, title=f"{first} (first) and {second} (second), item by item")


def _row(gate: str, pairs: list[tuple[Sample, Sample]]) -> list[Cell]:
    tasks = list(dict.fromkeys(one.task for one, _ in pairs))
    scores = [
        estimate([[pair[side].outcomes for pair in pairs if pair[side].task == task] for task in tasks]).score
        for side in (0, 1)
    ]
    found = Paired.of((two.outcomes, one.outcomes) for one, two in pairs)
    return [gate, len(pairs), *(f"{100 * score:.1f}" for score in scores), *_counts(found)]


def _counts(found: Paired) -> list[Cell]:
    better = Paired(found.gained, found.lost).worse
    said = "first is better" if found.worse else "second is better" if better else "not told apart"
    return [found.lost, found.gained, f"{found.p_value:.2g}", said]
