"""``qwen-bench quality``: the quality gates, against one server."""

from qwen_serve.bench.arguments import StoreOptions
from qwen_serve.bench.gates.options import GateOptions, GateServer
from qwen_serve.bench.provenance import is_local
from qwen_serve.bench.report.views import show
from qwen_serve.bench.store import Run

SAMPLES = "samples.jsonl"


def quality(
    *,
    server: GateServer = GateServer(),
    store: StoreOptions = StoreOptions(),
    gates: GateOptions = GateOptions(),
) -> int:
    """Run the competition's quality gates against a server, through lm-eval, with 95% intervals.

    - `qwen-bench quality --url http://127.0.0.1:8080 --tasks nano`
    - `qwen-bench quality --tasks official --limit 0.1`
    - `qwen-bench quality --tasks gsm8k --limit 200 --concurrency 64`

    official: MMLU-Pro, IFEval, GPQA-Diamond and GSM8K, fetched from the hub. nano: gates like the first
    three, on the bundled model's held-out items, without a network.

    Intervals are Wilson's, for the effective number of items if subtasks weigh the same or an item has
    several outcomes. The verdict is undecided if the interval contains the threshold. If every item was
    asked, the score itself decides. The run's samples.jsonl has all replies. The exit status is 0 if every
    gate was measured, whatever the verdicts.
    """
    from qwen_serve.bench.gates.measure import ask_gates, load_gates, probe  # lm-eval takes seconds to import

    model, about = probe(server)
    loaded = load_gates(gates)
    name = server.name or about["url"]
    with Run.begin(
        store.out,
        "quality",
        settings=gates.settings(),
        card=store.card,
        local=is_local(server.url),
        notes=store.note,
    ) as run:
        run.describe(name, **about)
        try:
            ask_gates(run, name, loaded, gates, server=server, model=model, samples=run.folder / SAMPLES)
        finally:
            show(run)
    return 0
