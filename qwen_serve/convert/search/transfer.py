"""Types for a model that is too large to probe, from the probes of a smaller one of its family.

What a group of the small model costs at a type is what the group of the same role and the same place in the
depth costs in the large one, whose tensors share it equally. That is an assumption: the large model's own
search measures it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.search.groups import HEAD, TOKEN_EMBEDDING, Layout, Matrix, Type
from qwen_serve.convert.search.law import Sensitivity, fit
from qwen_serve.convert.search.record import Record
from qwen_serve.convert.search.search import DRAFT_WEIGHT, limits, probe_value, probed
from qwen_serve.convert.search.solve import choose
from qwen_serve.convert.search.target import Target

BAND = re.compile(r" \d+(-\d+)?$")


@dataclass(frozen=True)
class Measured:
    """A group of the small model: its law, its tensors' mean error by type, and their number."""

    law: Sensitivity
    errors: Mapping[Type, float]
    count: int


@dataclass(frozen=True)
class Costs:
    """Divergence [nats] of each tensor of the large model, by type."""

    layout: Layout
    of: Mapping[str, Mapping[Type, float]]

    @classmethod
    def transferred(cls, layout: Layout, small: Layout, record: Record) -> Costs:
        """
        Raises:
            ConvertError: the record lacks a probe of the small model, or a role of the large one.
        """
        known: dict[str, list[Measured]] = defaultdict(list)
        for group, matrices in small.groups.items():
            measured = {}
            for kind in probed(matrices[0]):
                if (reading := record.reading({m.name: kind for m in matrices})) is None:
                    raise ConvertError(
                        f"the record has no probe of {group} at {kind.name}; finish its search"
                    )
                measured[kind] = probe_value(reading, matrices)
            errors = [record.errors[m.name] for m in matrices]
            mean = {kind: fmean(each[kind] for each in errors) for kind in errors[0]}
            known[_role(group)].append(Measured(fit(errors, measured), mean, len(matrices)))
        usual: dict[Type, list[float]] = defaultdict(list)
        for each in record.errors.values():
            for kind, error in each.items():
                usual[kind].append(error)
        bands: dict[str, list[str]] = defaultdict(list)
        for group in layout.groups:
            bands[_role(group)].append(group)
        found: dict[str, dict[Type, float]] = {}
        for role, groups in bands.items():
            like = known.get(role) or known.get(_role_of_tied(role, small))
            if not like:
                raise ConvertError(f"the record has no probe of {role}: is it of a model of another family?")
            members = sum(len(layout.groups[group]) for group in groups)
            share = sum(one.count for one in like) / members
            for place, group in enumerate(groups):
                one = like[place * len(like) // len(groups)]
                for m in layout.groups[group]:
                    found[m.name] = {
                        kind: share * one.law.cost(one.errors.get(kind, fmean(usual[kind])))
                        for kind in m.types
                    }
        return cls(layout, found)

    def solve(self, target: Target) -> dict[str, Type]:
        """The types of least divergence within a target without one. Raises ConvertError: there are none."""
        weights = [[self._weighted(m, kind) for kind in m.types] for m in self.layout.matrices]
        chosen = choose(weights, [(amounts, room) for _, amounts, room in limits(self.layout, target)])
        if chosen is None:
            raise ConvertError(f"no types keep to {target.label.removeprefix('auto-')}")
        return {m.name: m.types[i] for m, i in zip(self.layout.matrices, chosen, strict=True)}

    def shares(self, types: Mapping[str, Type]) -> dict[str, float]:
        """Each tensor's part of the divergence; of the drafts' for those of the MTP block."""
        return {m.name: self.of[m.name][types[m.name]] for m in self.layout.matrices}

    def total(self, types: Mapping[str, Type]) -> float:
        """The divergence of next tokens, without the MTP block."""
        return sum(self.of[m.name][types[m.name]] for m in self.layout.matrices if not m.mtp)

    def _weighted(self, m: Matrix, kind: Type) -> float:
        return (DRAFT_WEIGHT if m.mtp else 1.0) * self.of[m.name][kind]


def _role(group: str) -> str:
    return BAND.sub("", group)


def _role_of_tied(role: str, small: Layout) -> str:
    """The small model's embedding for a head that it has not: it is both."""
    tied = all(m.name != HEAD for m in small.matrices)
    return TOKEN_EMBEDDING.removesuffix(".weight") if tied and f"{role}.weight" == HEAD else role
