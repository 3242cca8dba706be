"""Costs of a block drafter's passes, computed from its file."""

from pathlib import Path

import pytest

from qwen_serve.bench.analysis.block_drafter import WINDOW, BlockDrafter
from qwen_serve.bench.analysis.cards import Drafts, decode_passes, prefill_passes
from qwen_serve.bench.analysis.geometry import Geometry
from qwen_serve.bench.errors import BenchError
from qwen_serve.llamacpp.gguf import read_header


@pytest.fixture(scope="module")
def target(nano_f32: Path) -> Geometry:
    return Geometry.load(nano_f32)


FEATURES = 3 * 256 * 4  # what goes into three layers, F32
CACHE = 2 * 3 * 2 * 2 * 64  # F16, layers, keys and values, heads, elements


def test_one_pass_injects_the_newest_rows_and_fills_a_block(target: Geometry, nano_draft_f32: Path) -> None:
    drafter = BlockDrafter(nano_draft_f32, target)
    tensors = {tensor.name: tensor.n_bytes for tensor in read_header(nano_draft_f32).tensors.values()}
    layers = sum(n_bytes for name, n_bytes in tensors.items() if name.startswith("blk."))
    work = drafter.draft(16, 64)
    weights = tensors["fc.weight"] + layers + target.head.n_bytes
    seen, written = 64 + 16, 2 * 16
    assert work.n_bytes == weights + 16 * FEATURES + (seen + written) * CACHE
    assert drafter.draft(16, 8192).n_bytes == drafter.draft(16, 1.5 * WINDOW).n_bytes, "it sees no further"
    keys = sum(n_bytes for name, n_bytes in tensors.items() if "attn_k." in name or "attn_v." in name)
    assert drafter.inject(5).n_bytes == tensors["fc.weight"] + keys + 5 * (FEATURES + CACHE)


def test_features_stay_on_the_card(target: Geometry, nano_draft_f32: Path) -> None:
    drafter = BlockDrafter(nano_draft_f32, target)
    drafts = Drafts(15, 0.8, mtp=False, block=drafter)
    *read, keep, inject = (work for work, _ in prefill_passes(target, 1200, drafts, cached=False))
    assert len(read) == 3
    assert (keep.n_bytes, keep.kernels) == (1200 * FEATURES, 3 * 3), "by each pass, for each layer"
    assert inject == drafter.inject(WINDOW)
    *_, keep, inject = (work for work, _ in prefill_passes(target, 1200, drafts, cached=True))
    assert (keep, inject) == (drafter.keep(1), drafter.inject(1))


def test_a_step_verifies_keeps_features_and_drafts(target: Geometry, nano_draft_f32: Path) -> None:
    drafter = BlockDrafter(nano_draft_f32, target)
    drafts = Drafts(15, 0.81, mtp=False, block=drafter)
    passes = list(decode_passes(target, 64, 1 + round(4 * drafts.tokens), drafts))
    step = [target.verify(16, 64, snapshots=15), drafter.keep(16), drafter.draft(16, 64)]
    assert [work for work, _ in passes[:3]] == step, "a whole block is taken back without a copy"
    assert sum(share for _, share in passes) == pytest.approx(3 * 4, rel=0.05)


def test_another_kind_of_file_is_refused(target: Geometry, nano_f32: Path) -> None:
    with pytest.raises(BenchError, match="not a block drafter's tensors"):
        BlockDrafter(nano_f32, target)
