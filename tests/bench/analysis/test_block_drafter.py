"""What a block drafter's passes cost, by its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.analysis.block_drafter import WINDOW, BlockDrafter
from bench.analysis.cards import CARDS, Drafts, Reached, decode_passes
from bench.analysis.geometry import Geometry
from bench.errors import BenchError
from convert.gguf_header import read_tensors


@pytest.fixture(scope="module")
def target(nano_f32: Path) -> Geometry:
    return Geometry.load(nano_f32)


def test_a_block_reads_the_layers_and_the_targets_head(target: Geometry, nano_draft_f32: Path) -> None:
    drafter = BlockDrafter(nano_draft_f32, target)
    layers = sum(tensor.n_bytes for tensor in read_tensors(nano_draft_f32) if tensor.name.startswith("blk."))
    work = drafter.guess(16, 0)
    cache = 2 * 3 * 2 * 2 * 64 * 32  # f16, layers, keys and values, heads, elements; read, and written
    assert work.n_bytes == layers + target.head.n_bytes + cache
    assert work.host_bytes == 0
    assert drafter.guess(16, 8192).n_bytes == drafter.guess(16, 1.5 * WINDOW).n_bytes, "it sees no further"


def test_features_go_to_the_host_and_back(target: Geometry, nano_draft_f32: Path) -> None:
    drafter = BlockDrafter(nano_draft_f32, target)
    assert drafter.inject(5).host_bytes == 2 * 5 * 3 * 256 * 4
    assert drafter.read(8192).host_bytes == (8192 + WINDOW) * 3 * 256 * 4
    card, work = CARDS["A10G"], drafter.inject(5)
    terms = Reached().terms(card, work)
    assert terms[0] == work.n_bytes / card.bandwidth + work.host_bytes / card.host
    assert card.least(work) < terms.sum(), "an engine may leave them where they are"


def test_each_verification_has_a_way_back_an_injection_and_a_block(
    target: Geometry, nano_draft_f32: Path
) -> None:
    drafter = BlockDrafter(nano_draft_f32, target)
    drafts = Drafts(15, 0.81, mtp=False, block=drafter)
    passes = list(decode_passes(target, 64, 1 + round(4 * drafts.tokens), drafts))
    verify, way_back, inject, block = (work for work, _ in passes[:4])
    wrong = 1 - 0.81**15
    right = sum(0.81**i for i in range(1, 16)) - 15 * (1 - wrong)
    again = target.verify(16 + right, 64)
    assert verify.operations == pytest.approx(again.operations), "what was right goes along once more"
    assert way_back.n_bytes == pytest.approx(2 * (1 + wrong) * target.state_bytes)
    assert inject == drafter.inject(drafts.tokens)
    assert block == drafter.guess(16, 64)
    assert sum(share for work, share in passes if work.host_bytes) == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("drafts", [Drafts(2, 0.5, mtp=True), Drafts(8, 1.0, mtp=False)])
def test_what_is_taken_back_for_nothing_or_never_costs_nothing(target: Geometry, drafts: Drafts) -> None:
    assert drafts.rejected == 0
    assert next(decode_passes(target, 64, 9, drafts))[0] == target.verify(drafts.count + 1, 64)


def test_another_kind_of_file_is_refused(target: Geometry, nano_f32: Path) -> None:
    with pytest.raises(BenchError, match="not a block drafter's tensors"):
        BlockDrafter(nano_f32, target)
