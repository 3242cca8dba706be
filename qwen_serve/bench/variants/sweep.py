"""``qwen-bench sweep``: measures variants of a model, and recommends one.

A sweep is one run of the store, even after interruptions. The same command finds it by a fingerprint of the
variants' weights, server settings and timing settings, and continues it. Scores of the quality gates have a
fingerprint for each variant, so those of another sweep in the store are reused.
"""

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import copyfile
from time import perf_counter
from typing import Annotated, Any

from cyclopts import Parameter

from qwen_serve.bench import provenance
from qwen_serve.bench.arguments import comma_separated, repeated
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.gates.score import SUBTASKS
from qwen_serve.bench.gates.score import WORKLOAD as SCORES
from qwen_serve.bench.load.latency import read_baseline
from qwen_serve.bench.report.perplexity import WORKLOAD as DIVERGENCE
from qwen_serve.bench.report.sweep import FILE, WEIGHTS
from qwen_serve.bench.report.views import show
from qwen_serve.bench.store import Manifest, Run, load, manifests
from qwen_serve.bench.variants.plan import Plan, kept_vocabulary
from qwen_serve.bench.variants.stages import GATES, Stages, round_stage, samples_of
from qwen_serve.bench.variants.standing import FIRST
from qwen_serve.bench.variants.variant import check_distinct, of_quants, read_setting, read_variant
from qwen_serve.bench.variants.weights import EVERY_POSITION, Weights, make_weights, say
from qwen_serve.server.settings_sources import SettingsError, check_variant_settings
from qwen_serve.server.variant import Setting, Variant

ENV_PREFIX = "QWEN_"


def sweep(
    *,
    plan: Plan,
    quants: Annotated[tuple[str, ...], comma_separated(str)] = (),
    variants: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (),
    set_: Annotated[tuple[tuple[str, Setting], ...], repeated(read_setting), Parameter(name="--set")] = (),
    baseline: str | None = None,
    force: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Find the quant to ship: convert, serve, measure and rank the variants of a model.

    - `qwen-bench sweep --src models/nano --quants F16,Q8_0,Q4_K_M,Q2_K`
    - `qwen-bench sweep --src Qwen/Qwen3.5-4B --variants fast balanced mine.toml --limit all`

    Each variant is converted if its file is missing, then served, tested with the quality gates, and timed
    under both latency protocols. The converter measures the divergence from the unquantized model. The
    recommended variant is the fastest that passes every gate. Speed is the geometric mean over categories and
    protocols, with an interval that is paired by round.

    The same command continues an interrupted sweep. It repeats failed stages and keeps finished ones, even if
    the server's code has changed (--force measures all again). Variants are timed in turns, so timing starts
    again with another set of variants; the gates' scores are kept.

    Parameters
    ----------
    quants
        Quants of quant_recipes/, or F16, BF16, F32, separated by commas.
    variants
        Variants by name (balanced, exact, fast, reference, small), or TOML files in the same format.
    set_
        Server setting, as NAME=VALUE, for every variant that does not have it; may be repeated.
    baseline
        Reference of speeds: first (the first variant; default for nano), a variant's name, official (BF16 on
        an A10G; default for other models), or short=MS,medium=MS,long=MS.
    force
        Measure everything again.
    """
    chosen = choose_variants(quants, variants, dict(set_))
    kept_vocabulary(plan.convert_options)  # raises before anything is converted
    against = checked_baseline(baseline or (FIRST if plan.has_items else "official"), chosen)
    for variable in [variable for variable in os.environ if variable.startswith(ENV_PREFIX)]:
        say(f"{variable} is left out: a variant's settings are in its file")
        del os.environ[variable]
    try:
        say(f"weights of {len(chosen)} variants in {plan.models}")
        weights = make_weights(plan, chosen)
        failed = Sweep(plan, chosen, weights, against, force=force).run()
    except (KeyboardInterrupt, SystemExit):  # main turns SIGTERM into SystemExit
        say("the same command goes on from here")
        raise
    if failed:
        raise BenchError(f"{len(failed)} of {len(chosen)} variants failed: {', '.join(failed)}")
    return 0


class Sweep:
    """A sweep over variants. Those whose conversion failed have no weights."""

    def __init__(
        self,
        plan: Plan,
        variants: Sequence[Variant],
        weights: Mapping[str, Weights | BenchError],
        baseline: str | dict[str, float],
        *,
        force: bool,
    ) -> None:
        self._plan = plan
        self._variants = variants
        self._force = force
        self._errors: dict[str, str] = {}
        self._weights: dict[str, Weights] = {}
        for variant in variants:
            have = weights[variant.name]
            if isinstance(have, BenchError):
                self._fail(variant, str(have))
            else:
                self._weights[variant.name] = have
        sha256 = {name: have.sha256 for name, have in self._weights.items()}
        self._asked = {
            variant.name: plan.gates_fingerprint(variant, sha256[variant.name]) for variant in self._left()
        }
        fingerprint = plan.fingerprint(self._left(), sha256)
        self._settings = {
            "source": plan.src,
            "variants": [variant.name for variant in variants],
            "baseline": baseline,
            "rounds": plan.effort.rounds,
            **plan.timing(),
            "gates": None if plan.gates is None else plan.gates.settings(),
            "convert_options": list(plan.convert_options),
            "fingerprint": fingerprint,
        }

    def run(self) -> list[str]:
        """Run all unfinished stages and print the tables. Returns the failures. A variant's failure does not
        stop the others."""
        known = {} if self._force else manifests(self._plan.store.out)
        with self._begin(known) as run:
            self._take_down(run, known)
            stages = Stages(self._plan, run)
            try:
                self._ask_gates(run, stages)
                for number in range(1, self._plan.effort.rounds + 1):
                    self._time(run, stages, number)
            finally:
                show(run)
        say(f"recorded in {run.folder}; qwen-bench report {self._plan.store.out} makes a page of it")
        return list(self._errors)

    def _begin(self, known: Mapping[Path, Manifest]) -> Run:
        """The store's run of this sweep, or a new run."""
        fingerprint = self._settings["fingerprint"]
        mine = [folder for folder, one in known.items() if one.settings.get("fingerprint") == fingerprint]
        if mine:
            return self._resume(mine[-1], known[mine[-1]])
        return self._plan.store.begin("sweep", self._settings)

    def _take_down(self, run: Run, known: Mapping[Path, Manifest]) -> None:
        """Record the facts about each variant that are known before a server runs."""
        for variant in self._variants:
            about = variant.model_dump(mode="json", exclude={"name", "settings"})
            error = self._errors.get(variant.name)
            run.describe(variant.name, **about, settings=self._plan.server_settings(variant), error=error)
        for variant in self._left():
            have = self._weights[variant.name]
            run.describe(variant.name, file=have.path.name, sha256=have.sha256)
            run.add(variant.name, WEIGHTS, FILE, 1, have.values)
            run.add(variant.name, DIVERGENCE, EVERY_POSITION, 1, have.divergence)
            if self._plan.gates is not None and not self._has_scores(run.manifest, variant):
                asked = self._asked[variant.name]
                before = run.manifest.subjects[variant.name].get("asked", asked)
                replies = samples_of(run.folder, variant.name)
                if before != asked and replies.is_file():
                    replies.rename(samples_of(run.folder, f"{variant.name}-{before}"))
                run.describe(variant.name, asked=asked, gates=None)
                self._adopt_scores(run, variant, known)

    def _resume(self, folder: Path, before: Manifest) -> Run:
        """Resume a run. Keep scores of gates with the same fingerprint, and rounds in which every variant was
        timed."""
        names = [variant.name for variant in self._left()]
        scored = {v.name for v in self._left() if self._plan.gates is None or self._has_scores(before, v)}
        done = {name: dict(before.subjects.get(name, {}).get("stages", {})) for name in names}
        whole = set.intersection(*(set(stages) for stages in done.values())) if done else set()
        for name, stages in done.items():
            done[name] = {
                stage: spent
                for stage, spent in stages.items()
                if (name in scored if stage == GATES else stage in whole)
            }

        def keep(row: Mapping[str, Any]) -> bool:
            if row["workload"] in (WEIGHTS, DIVERGENCE):
                return False
            if row["workload"] in (SCORES, SUBTASKS):
                return row["subject"] in scored
            return round_stage(row["round"]) in whole

        run = Run.resume(folder, keep)
        asked = self._settings["gates"] or before.settings.get("gates")  # without gates, earlier scores stay
        run.manifest.settings = {**self._settings, "gates": asked}
        if (now := provenance.commit()) != before.commit:
            run.note(f"begun at commit {before.commit}, gone on with at {now}")
            run.manifest.commit = now
        run.manifest.notes += [note for note in self._plan.store.note if note not in run.manifest.notes]
        for name, stages in done.items():
            run.describe(name, stages=stages)
        say(f"going on with {folder}")
        return run

    def _has_scores(self, manifest: Manifest, variant: Variant) -> bool:
        about = manifest.subjects.get(variant.name, {})
        return about.get("asked") == self._asked[variant.name] and GATES in about.get("stages", {})

    def _adopt_scores(self, run: Run, variant: Variant, known: Mapping[Path, Manifest]) -> None:
        """Copy a variant's scores from another sweep of the store if the fingerprint is the same."""
        for folder, manifest in reversed(list(known.items())):
            if folder.resolve() == run.folder.resolve():
                continue
            for name, about in manifest.subjects.items():
                stages = about.get("stages", {})
                if about.get("asked") != self._asked[variant.name] or GATES not in stages:
                    continue
                rows = load([folder]).of(subject=name, workload=[SCORES, SUBTASKS])
                for (workload, cell), of_cell in rows.groupby(["workload", "cell"], sort=False):
                    values = dict(zip(of_cell["metric"], of_cell["value"], strict=True))
                    run.add(variant.name, str(workload), str(cell), 1, values)
                if (samples := samples_of(folder, name)).is_file():
                    copyfile(samples, samples_of(run.folder, variant.name))
                run.describe(
                    variant.name,
                    gates=about.get("gates"),
                    scores_from=manifest.run,
                    stages={**self._stages(run, variant), GATES: stages[GATES]},
                )
                say(f"{variant.name}: scores of {manifest.run}")
                return

    def _ask_gates(self, run: Run, stages: Stages) -> None:
        if self._plan.gates is not None:
            left = [variant for variant in self._left() if GATES not in self._stages(run, variant)]
            self._visit(run, left, GATES, stages.gates)

    def _time(self, run: Run, stages: Stages, number: int) -> None:
        """Time one round: all variants in turn, beginning with another one each time, since the machine
        drifts within a round, too."""
        stage = round_stage(number)
        left = [variant for variant in self._left() if stage not in self._stages(run, variant)]
        first = (number - 1) % len(left) if left else 0
        self._visit(run, [*left[first:], *left[:first]], stage, lambda one: stages.time(one, number))

    def _visit(
        self, run: Run, variants: Sequence[Variant], stage: str, measure: Callable[[Variant], None]
    ) -> None:
        spent: list[float] = []
        for number, variant in enumerate(variants, 1):
            say(f"{stage} [{number}/{len(variants)}] {variant.name}")
            began = perf_counter()
            error = attempt(measure, variant, run.folder)
            spent.append(perf_counter() - began)
            if error is not None:
                self._fail(variant, error)
                run.describe(variant.name, error=error)
                continue
            run.describe(variant.name, stages={**self._stages(run, variant), stage: spent[-1]})
            if number < len(variants):
                minutes = (len(variants) - number) * sum(spent) / len(spent) / 60
                say(f"  done in {spent[-1]:.0f} s, about {minutes:.1f} min left of {stage}")

    def _fail(self, variant: Variant, error: str) -> None:
        say(f"{variant.name}: FAILED: {error}")
        self._errors[variant.name] = error

    def _left(self) -> list[Variant]:
        """The variants that have not failed."""
        return [variant for variant in self._variants if variant.name not in self._errors]

    @staticmethod
    def _stages(run: Run, variant: Variant) -> dict[str, float]:
        stages: dict[str, float] = run.manifest.subjects.get(variant.name, {}).get("stages", {})
        return stages


def attempt(measure: Callable[[Variant], None], variant: Variant, folder: Path) -> str | None:
    """Run one stage of one variant. Returns the reason of a failure, else None."""
    try:
        measure(variant)
    except BenchError as error:
        return str(error)
    except Exception as error:  # errors of lm-eval or a dataset do not stop the other variants
        path = folder / "errors.txt"
        with path.open("a", encoding="utf-8") as file:
            file.write(traceback.format_exc() + "\n")
        return f"{type(error).__name__}: {error} ({path})"
    return None


def choose_variants(
    quants: Sequence[str], named: Sequence[str], common: Mapping[str, Setting]
) -> list[Variant]:
    """The variants of --quants, then those of --variants, with the settings of --set. Raises BenchError for
    invalid ones."""
    try:
        check_variant_settings(common, "--set")
    except SettingsError as error:
        raise BenchError(str(error)) from error
    variants = [*of_quants(quants), *(read_variant(name) for name in named)]
    if not variants:
        raise BenchError("nothing to measure: want --quants Q8_0,Q4_K_M,... or --variants NAME...")
    variants = [variant.with_settings(common) for variant in variants]
    check_distinct(variants)
    return variants


def checked_baseline(text: str, variants: Sequence[Variant]) -> str | dict[str, float]:
    """The value of --baseline: FIRST, a variant's name, or milliseconds by category. Raises BenchError."""
    if text == FIRST:
        return text
    by_name = {variant.name.lower(): variant.name for variant in variants}
    if text.lower() in by_name:
        return by_name[text.lower()]
    if "=" not in text and text != "official":
        names = ", ".join(by_name.values())
        raise BenchError(f"--baseline {text}: want first, one of {names}, official or short=MS,...")
    return read_baseline(text)
