"""Tables of `qwen-bench engine kv-cache`."""

from qwen_serve.bench.analysis.statistics import percentiles
from qwen_serve.bench.gates.estimate import Paired
from qwen_serve.bench.store import Results
from qwen_serve.bench.terminal import Cell, Table

WORKLOAD = "KV cache"
"""The store's workload, with a cell for each type."""


def kv_cache_tables(results: Results) -> list[Table]:
    """A table for each run and model, with a row for each type: bytes, time, divergence from f16,
    retrieval."""
    made: list[Table] = []
    for (run, subject), rows in results.of(workload=WORKLOAD).groupby(["run", "subject"], sort=False):
        manifest = results.manifests[str(run)]
        times = percentiles(rows, "step_time", "cell")
        lines: list[list[Cell]] = []
        for name, of_type in rows.groupby("cell", sort=False):
            values = dict(zip(of_type["metric"], of_type["value"], strict=True))
            spread = times.get((str(name),))
            lines.append([str(name), int(values["kv_bytes"]), None if spread is None else spread.p50])
            if "retrieved" not in values:  # an interrupted run
                lines[-1] += [None] * 7
                continue
            paired = Paired(int(values["lost_items"]), int(values["gained_items"]))
            lines[-1] += [
                f"{values['kld_mean']:.6f}",
                f"{values['kld_p99']:.5f}",
                f"{values['same_top']:.2f}",
            ]
            lines[-1] += [f"{values['retrieved']:.1f}", paired.lost, paired.gained, f"{paired.p_value:.2g}"]
        settings = manifest.settings
        scored = rows[rows["metric"] == "scored_tokens"]["value"].max()
        notes = [
            "keys/values; plain: without llama.cpp's rotation of the heads before they are quantized",
            f"KLD: nats from the first row's, over {scored:,.0f} tokens, the second halves of chunks of "
            f"{settings['context']:,}; ms: a step of one sequence with as many tokens",
            f"retrieved: of the tokens of random numbers that come again after {settings['context'] // 2:,} "
            "tokens, those that are the first choice; lost and gained against the first row, p by McNemar's "
            "exact test",
        ]
        header = ["KV cache", "bytes a token", "ms", "KLD", "KLD 99%", "same top %", "retrieved %"]
        header += ["lost", "gained", "p"]
        title = f"{subject}: types of the KV cache"
        made.append(Table(header, lines, title=title, notes=[*notes, *manifest.notes]))
    return made
