"""The stages from a checkpoint to quantized files; a stage with a finished output is skipped.

    checkpoint        -> <name>-F16.gguf, unless the source is a GGUF
    F16               -> <name>.calibration.txt, <name>.evaluation.txt, and texts unlike them
    F16 + calibration -> <name>.imatrix.gguf
    F16 + imatrix     -> <name>-<QUANT>.gguf; --method compensated, --distill read the text, too
    F16 + evaluation  -> <name>-<QUANT>.json
    checkpoint        -> mmproj-<name>-F16.gguf, if it has a vision tower

and for a searched recipe, which is then quantized and reported like any other:

    F16               -> <name>.search.txt
    F16 + imatrix + search text -> <name>.search.json, all measurements; <name>-auto-<TARGET>.toml

All quants share the outputs without a quant's name. A recipe that prunes layers, or --keep-vocab, has a base
and an imatrix of its own, named after what is pruned. The whole model writes the texts.
"""

import sys
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_serve.convert.calibration import TEXT_VERSION, Purpose
from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.compensation import COMPENSATION_VERSION
from qwen_serve.convert.cut import WHOLE, Pruning
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.evaluation import TEXTS, Kind, write_any
from qwen_serve.convert.gguf_file import write_gguf
from qwen_serve.convert.grids import GRID_VERSION, Kept, has_grids
from qwen_serve.convert.imatrix import Resume, check_fits, collect_imatrix
from qwen_serve.convert.mmproj import Mmproj, left_out
from qwen_serve.convert.options import Options
from qwen_serve.convert.prune import kept_layers
from qwen_serve.convert.prune_vocab import kept_tokens
from qwen_serve.convert.quantize import DISTILLATION_VERSION, Rewriting, quantize
from qwen_serve.convert.recipes import Recipe
from qwen_serve.convert.report import Report, print_report, print_serving, print_table, write_report
from qwen_serve.convert.search import (
    SEARCH_VERSION,
    Found,
    Paths,
    Target,
    as_recipe,
    check_reach,
    evidence_of,
    is_record,
    print_found,
    search,
    with_results,
    write_recipe,
)
from qwen_serve.convert.source import Source
from qwen_serve.convert.split import split
from qwen_serve.convert.stages import Output, StageRecord, file_digest, fingerprint
from qwen_serve.convert.tensors import FloatType, TensorPlan, plan_tensors
from qwen_serve.convert.vocab import Vocab
from qwen_serve.convert.whole_model import UnquantizedFile
from qwen_serve.llamacpp.patches import LLAMA_VERSION

# Part of every base's fingerprint: raise it whenever the same checkpoint comes out differently.
CONVERTER_VERSION = 3
MOST_BITS = 9.0  # of a searched recipe: every tensor at 8.5, some in F32
HEADER_ROOM = 32_000_000  # a quarter of a million tokens and merges take 12 MB; the rest is for small files


class Pipeline:
    """Plans everything before it runs, so that impossible requests fail before anything is written."""

    def __init__(self, source: Source, model: Checkpoint | UnquantizedFile, options: Options) -> None:
        """
        Raises:
            ConvertError: the checkpoint, a recipe's layers or the calibration file cannot be used, or an
                option does not apply to a GGUF.
        """
        self._source, self._model, self._options = source, model, options
        self._models: list[Path] = []  # requested models that exist so far
        self._reports: list[Path] = []
        if options.imatrix_file is not None:
            check_fits(options.imatrix_file, [recipe.layers for recipe in options.recipes.values()])
        if options.calibration is not None and not options.calibration.is_file():
            raise ConvertError(f"--calibration {options.calibration}: no such file")
        self._mmproj: Mmproj | None = None
        self._kept_tokens: dict[int | None, NDArray[np.int64] | None] = {None: None}
        if isinstance(model, UnquantizedFile):
            self._check_given(model)
            return
        if options.vision is not None:
            self._mmproj = Mmproj.find(model, source, options.out, options.name, options.vision)
        self._kept = {r.layers: kept_layers(model.config, r.layers) for r in options.recipes.values()}
        self._kept[()] = tuple(range(model.config.n_layers))
        counts = [self._cut(recipe).tokens for recipe in (None, *options.recipes.values())]
        if any(counts):
            vocab = Vocab.load(model.folder, model.config)
            self._n_tokens = len(vocab.tokens)
            self._kept_tokens |= {count: kept_tokens(vocab, count) for count in counts if count}

    def _check_given(self, model: UnquantizedFile) -> None:
        """Raises ConvertError for outputs that a GGUF cannot give, or that would overwrite it."""
        options = self._options
        names = [self._name(name, recipe) for name, recipe in options.recipes.items()]
        if options.search is not None:
            names.append(self._name(options.search.label, None))
        model.check_outputs(
            types={options.outtype, *options.float_types},
            pruned=any(self._cut(recipe) != WHOLE for recipe in (None, *options.recipes.values())),
            paths=[self._path(f"{name}.gguf") for name in names],
        )

    def run(self) -> None:
        """Makes every output that does not exist yet.

        Raises:
            ConvertError: too little disk, or a stage that failed.
        """
        options = self._options
        with StageRecord.locked(options.out, options.name, force=options.force) as self._record:
            self._record.check_room(self._estimates(), self._beside())
            for float_type in options.float_types:
                base = self._make_base(float_type, self._cut(None))
                self._make_report(base, float_type, None)
            for name, recipe in options.recipes.items():
                self._make_quant(name, recipe)
            if options.search is not None:
                self._make_searched(options.search)
            if self._mmproj is not None:
                self._mmproj.make(self._record, self._model_fingerprint)
            elif options.vision and isinstance(self._model, Checkpoint) and (why := left_out(self._model)):
                print(why, file=sys.stderr)
        print_table(self._reports)
        print_serving(self._models)

    # each output's name and inputs

    def _cut(self, recipe: Recipe | None) -> Pruning:
        if recipe is None:
            return Pruning(tokens=self._options.keep_vocab)
        return Pruning(recipe.layers, recipe.keep_vocab or self._options.keep_vocab)

    def _base(self, float_type: FloatType, cut: Pruning) -> Output:
        if isinstance(self._model, UnquantizedFile):
            return self._given
        parts: dict[str, Any] = {
            "converter": CONVERTER_VERSION,
            "checkpoint": self._model_fingerprint,
            "source": [self._source.name, self._source.repo_id, self._source.revision],
            "type": float_type,
            "dropped": list(cut.layers),
        }
        if cut.tokens is not None:
            parts["kept_regular_tokens"] = cut.tokens
        return Output(self._path(f"{self._stem(cut)}-{float_type}.gguf"), fingerprint(parts))

    def _text(self, purpose: Purpose | Kind) -> Output:
        parts = {"text": TEXT_VERSION, "purpose": purpose, "model": self._reference.fingerprint}
        return Output(self._path(f"{self._options.name}.{purpose}.txt"), fingerprint(parts))

    def _measured_from(self, cut: Pruning) -> str:
        """Everything that the measurements of a search depend on; the target is not among it."""
        parts = {
            "search": SEARCH_VERSION,
            "base": self._base(self._options.outtype, cut).fingerprint,
            "text": self._text("search").fingerprint,
            "imatrix": self._imatrix(cut).fingerprint if self._options.use_imatrix else None,
            "llama": LLAMA_VERSION,
        }
        return fingerprint(parts)

    def _imatrix(self, cut: Pruning) -> Output:
        if (given := self._options.imatrix_file) is not None:
            return Output(given, file_digest(given))
        base = self._base(self._options.outtype, cut)
        parts = {"base": base.fingerprint, "text": self._calibrated_on(), "llama": LLAMA_VERSION}
        return Output(self._path(f"{self._stem(cut)}.imatrix.gguf"), fingerprint(parts))

    def _calibrated_on(self) -> str:
        """The identity of the calibration text."""
        calibration = self._options.calibration
        return file_digest(calibration) if calibration else self._text("calibration").fingerprint

    def _quant(self, name: str, recipe: Recipe) -> Output:
        cut = self._cut(recipe)
        parts: dict[str, Any] = {
            "base": self._base(self._options.outtype, cut).fingerprint,
            "imatrix": self._imatrix(cut).fingerprint if self._uses_imatrix(recipe) else None,
            "recipe": recipe.fingerprint,
            "llama": LLAMA_VERSION,
        }
        if self._options.compensates:
            parts["compensated"] = [COMPENSATION_VERSION, self._calibrated_on()]
        if has_grids(self._model):
            parts["grid"] = GRID_VERSION
        if self._options.distill:
            parts["distilled"] = [DISTILLATION_VERSION, self._options.distill, self._calibrated_on()]
        return Output(self._path(f"{self._name(name, recipe)}.gguf"), fingerprint(parts))

    @cached_property
    def _model_fingerprint(self) -> str:
        return self._model.fingerprint()

    @cached_property
    def _given(self) -> Output:
        """A given GGUF as the base. If it was written here, it keeps its recorded fingerprint."""
        path = self._source.path
        return Output(path, self._record.made_from(path) or self._model_fingerprint)

    @cached_property
    def _reference(self) -> Output:
        """The whole model in the base type. It writes the texts, and files are measured against it."""
        return self._base(self._options.outtype, WHOLE)

    def _stem(self, cut: Pruning) -> str:
        return "-".join(filter(None, (self._options.name, cut.label)))

    def _name(self, quant: str, recipe: Recipe | None) -> str:
        # a recipe's own setting is covered by its name
        tokens = None if recipe and recipe.keep_vocab else self._options.keep_vocab
        return f"{self._stem(Pruning(tokens=tokens))}-{quant}"

    def _path(self, file_name: str) -> Path:
        return self._options.out / file_name

    def _search_record(self) -> Path:
        return self._path(f"{self._stem(self._cut(None))}.search.json")

    def _uses_imatrix(self, recipe: Recipe) -> bool:
        return self._options.use_imatrix and recipe.uses_imatrix

    def _calibrates(self, recipe: Recipe) -> bool:
        return self._options.rewrites or self._uses_imatrix(recipe)

    def _writes_calibration(self, recipe: Recipe) -> bool:
        collects = self._uses_imatrix(recipe) and self._options.imatrix_file is None
        return (collects or self._options.rewrites) and self._options.calibration is None

    # stages

    def _make_base(self, float_type: FloatType, cut: Pruning) -> Output:
        if isinstance(model := self._model, UnquantizedFile):
            self._record.check(
                f"weights of {model.path.resolve()}", self._given.fingerprint, model.check_weights
            )
            return self._given
        plan = self._plan(float_type, cut)

        def write(part: Path) -> None:
            write_gguf(part, model, self._source, plan, self._kept[cut.layers], float_type)

        return self._record.make(self._base(float_type, cut), write)

    def _make_text(self, purpose: Purpose | Kind) -> Output:
        writer, runtime = self._make_base(self._options.outtype, WHOLE), self._options.runtime
        write = partial(write_any, writer.path, purpose=purpose, runtime=runtime)
        return self._record.make(self._text(purpose), write)

    def _make_imatrix(self, cut: Pruning) -> Output:
        base, output = self._make_base(self._options.outtype, cut), self._imatrix(cut)
        if self._options.imatrix_file is not None:
            check_fits(output.path, model=base.path)
            return output
        text, unfinished = self._make_calibration(), self._path(f"{self._stem(cut)}.imatrix.unfinished.npz")
        if self._options.force:
            unfinished.unlink(missing_ok=True)
        return self._record.make(
            output,
            lambda part: collect_imatrix(
                base.path,
                part,
                text=text,
                runtime=self._options.runtime,
                resume=Resume(unfinished, output.fingerprint),
            ),
        )

    def _make_calibration(self) -> Path:
        return self._options.calibration or self._make_text("calibration").path

    def _make_quant(self, name: str, recipe: Recipe) -> None:
        cut = self._cut(recipe)
        base = self._make_base(self._options.outtype, cut)
        imatrix = self._make_imatrix(cut).path if self._uses_imatrix(recipe) else None
        options = self._options
        rewriting: Rewriting | None = None
        if options.rewrites:
            rewriting = Rewriting(self._make_calibration(), options.compensates, options.distill)

        def write(part: Path) -> None:
            exact = None
            if isinstance(model := self._model, Checkpoint):
                plan = self._plan(options.outtype, cut)
                exact = Kept.choose(model, plan, base.path, recipe, weighted=imatrix is not None)
            quantize(base.path, part, recipe, imatrix, options.runtime, rewriting, exact)

        output = self._record.make(self._quant(name, recipe), write)
        self._make_report(output, name, recipe, imatrix)

    def _make_searched(self, target: Target) -> None:
        """Searches a recipe, makes its file and report, and writes the recipe with their results."""
        options, cut = self._options, self._cut(None)
        base = self._make_base(options.outtype, cut)
        check_reach(base.path, target, self._model.used_experts)  # before the slow stages
        imatrix = self._make_imatrix(cut).path if options.use_imatrix else None
        paths = Paths(
            base=base.path,
            text=self._make_text("search").path,
            imatrix=imatrix,
            record=self._search_record(),
            compensate_on=self._make_calibration() if options.compensates else None,
        )
        if options.force:
            paths.record.unlink(missing_ok=True)
        found = search(
            paths,
            target,
            used_experts=self._model.used_experts,
            made_from=self._measured_from(cut),
            runtime=options.runtime,
        )
        evidence = evidence_of(found, options.command, self._source.title)
        recipe = as_recipe(found, f"searched: {target.label.removeprefix('auto-')}", evidence)
        recipe = recipe.model_copy(update={"imatrix": options.use_imatrix})
        self._make_quant(target.label, recipe)
        quantized = self._path(f"{self._name(target.label, recipe)}.gguf")
        report = Report.from_json(quantized.with_suffix(".json").read_text(encoding="utf-8"))
        whole = recipe.model_copy(update={"evidence": with_results(evidence, report)})
        path = quantized.with_suffix(".toml")
        output = Output(path, fingerprint(whole.model_dump(mode="json")))
        self._record.make(output, lambda part: write_recipe(whole, part))
        print_found(found, report, path, self._took(target, recipe, found))

    def _took(self, target: Target, recipe: Recipe, found: Found) -> dict[str, float]:
        """Seconds of each stage of a searched file, over all runs."""
        file, record = self._quant(target.label, recipe), self._record
        purposes: tuple[Purpose, ...] = ("calibration", "search", "evaluation")
        took = {
            "texts": record.seconds(map(self._text, purposes)),
            "importance matrix": record.seconds([self._imatrix(self._cut(None))]),
            "search": found.seconds,
            "file": record.seconds([file]),
            "report": record.seconds([Output(file.path.with_suffix(".json"), "")]),
        }
        return {stage: seconds for stage, seconds in took.items() if seconds}

    def _make_report(
        self, quantized: Output, name: str, recipe: Recipe | None, imatrix: Path | None = None
    ) -> None:
        """Size, types and sha256, and the KL divergence from the whole model in the base type."""
        measured = (recipe is not None or self._cut(recipe) != WHOLE) and self._options.measure
        texts = {what: self._make_text(what) for what in TEXTS} if measured else {}
        compensated = measured and recipe is not None and self._options.compensates
        provenance = self._provenance(quantized, recipe)
        parts = {"provenance": provenance, "llama": LLAMA_VERSION}
        parts["texts"] = [text.fingerprint for text in texts.values()]
        output = Output(self._path(f"{self._name(name, recipe)}.json"), fingerprint(parts))
        self._record.make(
            output,
            lambda part: write_report(
                quantized.path,
                part,
                reference=self._reference.path if measured else None,
                recipe=recipe,
                imatrix=imatrix,
                texts={what: text.path for what, text in texts.items()},
                runtime=self._options.runtime,
                provenance=provenance,
                base=self._base(self._options.outtype, self._cut(recipe)).path if compensated else None,
            ),
        )
        if self._options.show_tensors:
            print_report(output.path)
        self._reports.append(output.path)
        if (most := self._options.split_max_size) is not None:
            split(quantized, most, self._record)
        self._models.append(quantized.path)

    def _provenance(self, quantized: Output, recipe: Recipe | None) -> dict[str, Any]:
        uses_imatrix = recipe is not None and self._uses_imatrix(recipe)
        calibration = self._options.calibration
        cut = self._cut(recipe)
        provenance: dict[str, Any] = {
            "source": self._source.title,
            "revision": self._source.revision,
            "gguf" if isinstance(self._model, UnquantizedFile) else "checkpoint": self._model_fingerprint,
            "fingerprint": quantized.fingerprint,
            "base": self._base(self._options.outtype, cut).path.name if recipe else None,
            "imatrix": self._imatrix(cut).path.name if recipe and uses_imatrix else None,
            "calibration": (calibration.name if calibration else "the model's own text")
            if recipe and self._calibrates(recipe)
            else None,
            "method": self._options.description if recipe else None,
        }
        if (kept := self._kept_tokens[cut.tokens]) is not None:
            counts = {"tokens": len(kept), "of": self._n_tokens}
            provenance["vocabulary"] = {"regular": cut.tokens, **counts}
        return provenance

    # room on the disk

    def _estimates(self) -> Iterator[tuple[Output, int]]:
        """Estimated bytes of the outputs, from tensor sizes and the recipes' bits per weight."""
        options, recipes = self._options, self._options.recipes.values()
        bases: set[tuple[FloatType, Pruning]] = {(t, self._cut(None)) for t in options.float_types}
        bases |= {(options.outtype, self._cut(recipe)) for recipe in recipes}
        if options.search is not None:
            bases |= {(options.outtype, self._cut(None)), (options.outtype, WHOLE)}
        measured = options.measure and (recipes or self._cut(None) != WHOLE)
        if measured or any(self._writes_calibration(recipe) for recipe in recipes):
            bases.add((options.outtype, WHOLE))
        for float_type, cut in bases if isinstance(self._model, Checkpoint) else ():
            yield self._base(float_type, cut), self._plan(float_type, cut).nbytes + HEADER_ROOM
        for name, recipe in options.recipes.items():
            elements = self._n_elements(self._cut(recipe))
            yield self._quant(name, recipe), int(elements * recipe.bits_per_weight / 8) + HEADER_ROOM
        if options.search is not None:
            elements = self._n_elements(self._cut(None))
            path = self._path(f"{self._name(options.search.label, None)}.gguf")
            yield Output(path, ""), int(elements * MOST_BITS / 8) + HEADER_ROOM
        if self._mmproj is not None:
            yield self._mmproj.output(self._model_fingerprint), self._mmproj.n_bytes

    def _beside(self) -> Iterator[Path]:
        """Small files that will be written."""
        for name in (*self._options.float_types, *self._options.recipes):
            yield self._path(f"{self._name(name, self._options.recipes.get(name))}.json")
        if self._options.search is not None:
            searched = self._path(f"{self._name(self._options.search.label, None)}.gguf")
            yield from map(searched.with_suffix, (".json", ".toml"))
            if not is_record(record := self._search_record()):
                yield record

    def _n_elements(self, cut: Pruning) -> int:
        if isinstance(self._model, UnquantizedFile):
            return self._model.n_elements
        return self._plan(self._options.outtype, cut).n_elements

    def _plan(self, float_type: FloatType, cut: Pruning) -> TensorPlan:
        assert isinstance(self._model, Checkpoint), "a GGUF is not planned, it is there"
        layers, tokens = self._kept[cut.layers], self._kept_tokens[cut.tokens]
        return plan_tensors(self._model, float_type, layers, tokens)
