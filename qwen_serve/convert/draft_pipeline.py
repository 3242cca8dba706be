"""The stages from a block drafter's checkpoint to quantized files, like `pipeline` for a model.

    checkpoint + target -> <name>-F16.gguf
    F16                 -> <name>-<QUANT>.gguf, <name>-<QUANT>.json

There is no importance matrix, since it gained nothing at four bits (docs/speculation.md).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qwen_serve.convert.draft import DraftCheckpoint, write_draft
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.options import Options
from qwen_serve.convert.pipeline import CONVERTER_VERSION, HEADER_ROOM
from qwen_serve.convert.quantize import quantize
from qwen_serve.convert.recipes import Recipe
from qwen_serve.convert.report import print_report, print_table, write_report
from qwen_serve.convert.source import Source
from qwen_serve.convert.stages import Output, StageRecord, fingerprint
from qwen_serve.convert.tensors import FloatType, plan_tensors
from qwen_serve.llamacpp.patches import LLAMA_VERSION


@dataclass(frozen=True)
class Parameters:
    """Number of weights of the drafter, of the target as served, and of the whole original checkpoint."""

    drafter: int
    target: int
    original: int

    @classmethod
    def of(cls, draft: DraftCheckpoint) -> Parameters:
        """Counted from the headers of both checkpoints."""
        target = draft.target
        plan = plan_tensors(target, "F16", tuple(range(target.config.n_layers)))
        return cls(
            drafter=draft.plan("F16").n_elements,
            target=plan.n_elements,
            original=sum(tensor.n_elements for tensor in target.tensors.values()),
        )

    def __str__(self) -> str:
        together = self.drafter + self.target
        return (
            f"{self.drafter:,} weights, {together:,} with the target as it is served (MTP head included); "
            f"the original has {self.original:,} with its vision tower: {together / self.original:.1%}"
        )


class DraftPipeline:
    """Converts and quantizes one drafter; skips finished outputs."""

    def __init__(self, source: Source, draft: DraftCheckpoint, options: Options) -> None:
        """
        Raises:
            ConvertError: an option does not apply to drafters, a recipe prunes, or a tensor has no rule.
        """
        self._source, self._draft, self._options = source, draft, options
        self._parameters = Parameters.of(draft)
        self._reports: list[Path] = []
        if options.calibration is not None or options.keep_vocab is not None or options.rewrites:
            raise ConvertError("--calibration, --method, --distill and --keep-vocab are not for drafters")
        if pruning := [n for n, r in options.recipes.items() if r.layers or r.keep_vocab is not None]:
            raise ConvertError(
                f"--quant {pruning[0]}: its recipe drops layers or tokens, which a drafter keeps"
            )

    def run(self) -> None:
        """Makes all requested outputs that do not exist yet.

        Raises:
            ConvertError: too little disk, or a stage that failed.
        """
        options = self._options
        with StageRecord.locked(options.out, options.name, force=options.force) as self._record:
            outputs = list(map(self._float, options.float_types)) + [
                self._quant(name, recipe) for name, recipe in options.recipes.items()
            ]
            self._record.check_room(self._estimates(), [one.path.with_suffix(".json") for one in outputs])
            models = [self._make_float(kind) for kind in options.float_types]
            models += [self._make_quant(name, recipe) for name, recipe in options.recipes.items()]
        print_table(self._reports)
        print(self._parameters)
        for path in models:
            print("to draft with it:")
            print(f"  python -m qwen_serve.server --model TARGET.gguf --draft-model {shlex.quote(str(path))}")

    def _output(self, quant: str, **made_from: Any) -> Output:
        parts = {
            "converter": CONVERTER_VERSION,
            "checkpoint": self._checkpoint_fingerprint,
            "source": [self._source.name, self._source.repo_id, self._source.revision],
            **made_from,
        }
        return Output(self._options.out / f"{self._options.name}-{quant}.gguf", fingerprint(parts))

    def _float(self, kind: FloatType) -> Output:
        return self._output(kind, type=kind)

    def _quant(self, name: str, recipe: Recipe) -> Output:
        return self._output(name, type=self._options.outtype, recipe=recipe.fingerprint, llama=LLAMA_VERSION)

    @cached_property
    def _checkpoint_fingerprint(self) -> str:
        return self._draft.fingerprint()

    def _make_float(self, kind: FloatType, *, report: bool = True) -> Path:
        output = self._record.make(
            self._float(kind), lambda part: write_draft(part, self._draft, self._source, kind)
        )
        if report:
            self._report(output, None)
        return output.path

    def _make_quant(self, name: str, recipe: Recipe) -> Path:
        base = self._make_float(self._options.outtype, report=False)
        output = self._record.make(
            self._quant(name, recipe),
            lambda part: quantize(base, part, recipe=recipe, imatrix=None, runtime=self._options.runtime),
        )
        self._report(output, recipe)
        return output.path

    def _report(self, model: Output, recipe: Recipe | None) -> None:
        provenance = {
            "source": self._source.title,
            "revision": self._source.revision,
            "target": self._draft.target.folder.name,
            "fingerprint": model.fingerprint,
            "parameters": vars(self._parameters),
        }
        report = Output(model.path.with_suffix(".json"), fingerprint(provenance))
        self._record.make(
            report,
            lambda part: write_report(
                model.path,
                part,
                reference=None,
                recipe=recipe,
                imatrix=None,
                texts={},
                runtime=self._options.runtime,
                provenance=provenance,
            ),
        )
        if self._options.show_tensors:
            print_report(report.path)
        self._reports.append(report.path)

    def _estimates(self) -> Iterator[tuple[Output, int]]:
        options = self._options
        for kind in {*options.float_types, *([options.outtype] if options.recipes else [])}:
            yield self._float(kind), self._draft.plan(kind).nbytes + HEADER_ROOM
        for name, recipe in options.recipes.items():
            n_bytes = int(self._parameters.drafter * recipe.bits_per_weight / 8) + HEADER_ROOM
            yield self._quant(name, recipe), n_bytes
