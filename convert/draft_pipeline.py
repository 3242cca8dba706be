"""The way from a block drafter's checkpoint to quantized files, as `pipeline` goes it for a model.

    checkpoint + target -> <name>-F16.gguf
    F16                 -> <name>-<QUANT>.gguf, <name>-<QUANT>.json

Quantized without an importance matrix: what a drafter reads comes from its target while that runs.
"""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from convert.draft import DraftCheckpoint, write_draft
from convert.errors import ConvertError
from convert.llama import LLAMA_VERSION
from convert.pipeline import CONVERTER_VERSION, HEADER_ROOM
from convert.progress import size
from convert.quantize import quantize
from convert.report import print_report, write_report
from convert.stages import StageRecord, fingerprint, locked, replacing
from convert.tensors import FLOAT_TYPES, plan_tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from convert.pipeline import Options
    from convert.recipes import Recipe
    from convert.source import Source
    from convert.tensors import FloatType


@dataclass(frozen=True)
class Parameters:
    """Weights of the drafter, of the target as it is served, and of the original checkpoint, whole."""

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
    """Converts and quantizes one drafter; what is finished already is left as it is."""

    def __init__(self, source: Source, draft: DraftCheckpoint, options: Options) -> None:
        """
        Raises:
            ConvertError: an option that is not for drafters, a recipe that prunes, or a tensor with no rule.
        """
        self._source, self._draft, self._options = source, draft, options
        self._parameters = Parameters.of(draft)
        if options.calibration is not None or options.keep_vocab is not None:
            raise ConvertError("--calibration and --keep-vocab are not for drafters")
        if pruning := [n for n, r in options.recipes.items() if r.layers or r.keep_vocab is not None]:
            raise ConvertError(
                f"--quant {pruning[0]}: its recipe drops layers or tokens, which a drafter keeps"
            )

    def run(self) -> None:
        """Make everything that is asked for and not there yet."""
        options = self._options
        options.out.mkdir(parents=True, exist_ok=True)
        with locked(options.out / ".convert.lock"):
            self._record = StageRecord(self._path(f"{options.name}.stages.json"))
            if options.force:
                self._record.forget()
            self._check_room()
            models = [self._make_float(kind) for kind in options.float_types]
            models += [self._make_quant(name, recipe) for name, recipe in options.recipes.items()]
        print(self._parameters)
        for path in models:
            print("to draft with it:")
            print(f"  python -m server --model TARGET.gguf --draft-model {shlex.quote(str(path))}")

    def _path(self, name: str) -> Path:
        return self._options.out / name

    def _made_from(self, **more: Any) -> str:
        source = self._source
        return fingerprint(
            {
                "converter": CONVERTER_VERSION,
                "checkpoint": self._draft.fingerprint(),
                "source": [source.name, source.repo_id, source.revision],
                **more,
            }
        )

    def _make_float(self, kind: FloatType, *, report: bool = True) -> Path:
        path, made_from = self._path(f"{self._options.name}-{kind}.gguf"), self._made_from(type=kind)
        self._make(path, made_from, lambda part: write_draft(part, self._draft, self._source, kind))
        if report:
            self._report(path, made_from, None)
        return path

    def _make_quant(self, name: str, recipe: Recipe) -> Path:
        base = self._make_float(self._options.outtype, report=False)
        path = self._path(f"{self._options.name}-{name}.gguf")
        made_from = self._made_from(
            type=self._options.outtype, recipe=recipe.fingerprint, llama=LLAMA_VERSION
        )
        run = partial(quantize, base, recipe=recipe, imatrix=None, runtime=self._options.runtime)
        self._make(path, made_from, lambda part: run(part))
        self._report(path, made_from, recipe)
        return path

    def _report(self, model: Path, made_from: str, recipe: Recipe | None) -> None:
        provenance = {
            "source": self._source.repo_id or self._source.name,
            "revision": self._source.revision,
            "target": self._draft.target.folder.name,
            "fingerprint": made_from,
            "parameters": vars(self._parameters),
        }
        write = partial(
            write_report,
            model,
            reference=None,
            recipe=recipe,
            imatrix=None,
            text=None,
            runtime=self._options.runtime,
            provenance=provenance,
        )
        path = model.with_suffix(".json")
        self._make(path, fingerprint(provenance), lambda part: write(part))
        print_report(path)

    def _make(self, path: Path, made_from: str, write: Callable[[Path], None]) -> None:
        if self._record.is_finished(path, made_from):
            print(f"{path}: already there")
            return
        with replacing(path) as part:
            write(part)
        self._record.finish(path, made_from)

    def _check_room(self) -> None:
        options = self._options
        kinds = {*options.float_types, *([options.outtype] if options.recipes else [])}
        needed = sum(self._draft.plan(kind).nbytes + HEADER_ROOM for kind in FLOAT_TYPES if kind in kinds)
        for recipe in options.recipes.values():
            needed += int(self._parameters.drafter * recipe.bits_per_weight / 8) + HEADER_ROOM
        if needed > (free := shutil.disk_usage(options.out).free):
            raise ConvertError(
                f"--out {options.out}: about {size(needed)} may be written, {size(free)} are free"
            )
