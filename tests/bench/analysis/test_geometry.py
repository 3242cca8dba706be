"""Bytes, operations and times of passes, against figures computed by hand."""

import pytest
from gguf import GGMLQuantizationType as Type

from qwen_serve.bench.analysis.cards import Card, Drafts, Reached, decode_passes, prefill_passes
from qwen_serve.bench.analysis.geometry import (
    ATTENTION_KERNELS,
    HEAD_KERNELS,
    LINEAR_KERNELS,
    NEXTN_KERNELS,
    SEVERAL_ROWS_KERNELS,
    Geometry,
    Work,
)
from qwen_serve.bench.errors import BenchError
from qwen_serve.llamacpp.gguf import TensorInfo

HIDDEN, FFN, VOCAB = 32, 64, 100


def tensors(kind: Type = Type.F16, *, draft: bool = True) -> list[TensorInfo]:
    """A recurrent layer, an attention layer, and an MTP block like the latter; matrices of `kind`."""

    def ffn(block: int) -> list[TensorInfo]:
        shapes = {"ffn_gate": (HIDDEN, FFN), "ffn_up": (HIDDEN, FFN), "ffn_down": (FFN, HIDDEN)}
        return [TensorInfo(f"blk.{block}.{name}.weight", shape, kind) for name, shape in shapes.items()]

    def attention(block: int) -> list[TensorInfo]:
        # 4 query heads and 2 key/value heads of 8; queries with their gate
        shapes = {
            "attn_q": (HIDDEN, 64),
            "attn_k": (HIDDEN, 16),
            "attn_v": (HIDDEN, 16),
            "attn_output": (32, HIDDEN),
        }
        return [TensorInfo(f"blk.{block}.{name}.weight", shape, kind) for name, shape in shapes.items()]

    # 3 value heads of 16, 2 key heads of 16: convolution over 2 * 32 + 48 channels
    linear = [
        TensorInfo("blk.0.attn_qkv.weight", (HIDDEN, 112), kind),
        TensorInfo("blk.0.ssm_conv1d.weight", (4, 112), Type.F32),
        TensorInfo("blk.0.ssm_a", (3,), Type.F32),
        TensorInfo("blk.0.ssm_norm.weight", (16,), Type.F32),
        TensorInfo("blk.0.ssm_out.weight", (64, HIDDEN), kind),
    ]
    head = [TensorInfo("token_embd.weight", (HIDDEN, VOCAB), kind)]
    mtp = [TensorInfo("blk.2.nextn.eh_proj.weight", (2 * HIDDEN, HIDDEN), kind), *attention(2), *ffn(2)]
    return [*head, *linear, *ffn(0), *attention(1), *ffn(1), *(mtp if draft else [])]


FFN_ELEMENTS = 3 * 32 * 64
LINEAR_ELEMENTS = 32 * 112 + 64 * 32 + FFN_ELEMENTS
ATTENTION_ELEMENTS = 32 * 64 + 2 * 32 * 16 + 32 * 32 + FFN_ELEMENTS
SMALL_BYTES = 4 * (4 * 112 + 3 + 16)  # the convolution and the vectors, F32
STATE_ELEMENTS, CONV_ELEMENTS = 3 * 16 * 16, 3 * 112
WEIGHT_BYTES = 2 * (LINEAR_ELEMENTS + ATTENTION_ELEMENTS) + SMALL_BYTES
HEAD_BYTES = 2 * 32 * 100
STATE_BYTES = 4 * (STATE_ELEMENTS + CONV_ELEMENTS)


def test_a_decode_step_by_hand() -> None:
    geometry = Geometry(tensors())
    work = geometry.decode(10)
    kv = 2 * 32 * (10 + 1 + 1)  # ten read, the new one read and written
    assert work.n_bytes == WEIGHT_BYTES + HEAD_BYTES + 2 * 32 + kv + 2 * STATE_BYTES
    attention = 4 * 32 * 11  # q.k and p.v over eleven positions
    recurrence = 7 * STATE_ELEMENTS
    matrices = 2 * (LINEAR_ELEMENTS + ATTENTION_ELEMENTS + 32 * 100)
    assert work.operations == matrices + attention + recurrence
    assert work.kernels == LINEAR_KERNELS + ATTENTION_KERNELS + HEAD_KERNELS


def test_several_sequences_share_the_weights_only() -> None:
    geometry = Geometry(tensors())
    one, four = geometry.decode(10), geometry.decode(10, sequences=4)
    assert four.kernels == one.kernels + SEVERAL_ROWS_KERNELS * len(geometry.trunk)
    assert four.operations == 4 * one.operations
    weights = WEIGHT_BYTES + HEAD_BYTES
    assert four.n_bytes - weights == 4 * (one.n_bytes - weights)


def test_a_verification_has_logits_for_every_row() -> None:
    geometry = Geometry(tensors())
    work = geometry.verify(3, 10)
    pairs = 11 + 12 + 13
    assert work.operations == (
        3 * 2 * (LINEAR_ELEMENTS + ATTENTION_ELEMENTS + 3200) + 4 * 32 * pairs + 3 * 7 * STATE_ELEMENTS
    )
    assert work.n_bytes == WEIGHT_BYTES + HEAD_BYTES + 3 * 64 + 2 * 32 * (10 + 2 * 3) + 2 * STATE_BYTES
    assert geometry.verify(1, 10) == geometry.decode(10)


def test_a_verification_writes_the_states_before_its_last_tokens() -> None:
    geometry = Geometry(tensors())
    for rows, snapshots, further in ((1, 8, 0), (3, 8, 2), (9, 8, 8), (16, 8, 8), (16, 0, 0)):
        bare, work = geometry.verify(rows, 10), geometry.verify(rows, 10, snapshots=snapshots)
        assert work.n_bytes - bare.n_bytes == further * STATE_BYTES
        assert (work.operations, work.kernels) == (bare.operations, bare.kernels)


def test_a_prompt_is_read_in_passes_and_only_the_last_has_logits() -> None:
    first, second = Geometry(tensors()).prefill(10, ubatch=8)
    assert first.n_bytes == WEIGHT_BYTES + 8 * 64 + 2 * 32 * 16 + 2 * STATE_BYTES
    assert second.n_bytes == WEIGHT_BYTES + HEAD_BYTES + 2 * 64 + 2 * 32 * (8 + 4) + 2 * STATE_BYTES
    pairs = sum(range(1, 9)), 9 + 10
    for work, rows, seen, outputs in ((first, 8, pairs[0], 0), (second, 2, pairs[1], 1)):
        matrices = 2 * rows * (LINEAR_ELEMENTS + ATTENTION_ELEMENTS) + 2 * outputs * 3200
        assert work.operations == matrices + 4 * 32 * seen + rows * 7 * STATE_ELEMENTS


def test_quantized_weights_and_caches_move_fewer_bytes_for_the_same_operations() -> None:
    whole, quantized = Geometry(tensors()), Geometry(tensors(Type.Q8_0), kv_bytes=1.0)
    assert quantized.decode(10).operations == whole.decode(10).operations
    saved = whole.decode(10).n_bytes - quantized.decode(10).n_bytes
    matrices = LINEAR_ELEMENTS + ATTENTION_ELEMENTS + 3200 + 32
    assert saved == matrices * (2 - 34 / 32) + 32 * 12


def test_a_draft_reads_the_mtp_block_and_the_head() -> None:
    work = Geometry(tensors()).draft_step(10)
    assert work.n_bytes == 2 * (ATTENTION_ELEMENTS + 64 * 32) + HEAD_BYTES + 64 + 2 * 32 * 12
    assert work.kernels == ATTENTION_KERNELS + HEAD_KERNELS + NEXTN_KERNELS
    with pytest.raises(BenchError, match="no MTP block"):
        Geometry(tensors(draft=False)).draft_step(10)
    assert Geometry(tensors()).decode(10) == Geometry(tensors(draft=False)).decode(10)


def test_an_untied_head_is_read_instead_of_the_embedding() -> None:
    untied = Geometry([*tensors(), TensorInfo("output.weight", (HIDDEN, VOCAB), Type.F32)])
    assert untied.decode(10).n_bytes - Geometry(tensors()).decode(10).n_bytes == HEAD_BYTES


MADE_UP = Card("x", bandwidth=1000, compute=10_000, integer=20_000)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (Work(2000, 500, 3), (2.0, 0.0, 0.3)),
        (Work(2000, 30_000, 3), (0.0, 3.0, 0.3)),
        (Work(200, 500, 9), (0.2, 0.0, 0.9)),
    ],
)
def test_a_pass_takes_its_launches_and_the_slower_of_memory_and_compute(
    work: Work, expected: tuple[float, ...]
) -> None:
    assert Reached(launch=0.1).terms(MADE_UP, work) == pytest.approx(expected)


def test_what_kernels_reach_is_a_share_of_the_datasheet() -> None:
    half = Reached(bandwidth=0.5, compute=0.25)
    assert half.terms(MADE_UP, Work(2000, 500)) == pytest.approx((4.0, 0.0, 0.0))
    assert half.terms(MADE_UP, Work(2000, 30_000)) == pytest.approx((0.0, 12.0, 0.0))


@pytest.mark.parametrize(
    ("count", "acceptance", "tokens"), [(2, 0.5, 1.75), (4, 1.0, 5.0), (3, 0.0, 1.0), (1, 0.7, 1.7)]
)
def test_expected_tokens_of_a_verification(count: int, acceptance: float, tokens: float) -> None:
    assert Drafts(count, acceptance, mtp=False).tokens == pytest.approx(tokens)


def test_the_bound_knows_no_launches_and_takes_the_highest_rate_there_is() -> None:
    card = MADE_UP
    assert card.least(Work(2000, 500, 3)) == pytest.approx(2.0)
    assert card.least(Work(2000, 30_000, 3)) == pytest.approx(3.0)
    # kernels of quantized weights multiply 8-bit integers: the F16 rate is no bound for them
    assert card.least(Work(1000, 30_000, 3, integer=True)) == pytest.approx(1.5)


def test_a_request_is_the_sum_of_its_steps() -> None:
    geometry = Geometry(tensors())

    def moved(count: int, drafts: Drafts | None) -> float:
        return sum(work.n_bytes * times for work, times in decode_passes(geometry, 100, count, drafts))

    def read(tokens: int, *, cached: bool) -> float:
        passes = prefill_passes(geometry, tokens, cached=cached)
        return sum(work.n_bytes * times for work, times in passes)

    assert moved(5, None) == pytest.approx(sum(geometry.decode(100 + i).n_bytes for i in range(4)))
    right = sum(geometry.verify(2, at, snapshots=1).n_bytes for at in (100, 102))
    assert moved(5, Drafts(1, 1.0, mtp=False)) == pytest.approx(right)
    draft = geometry.draft_step(100).n_bytes
    verify = geometry.verify(2, 100, snapshots=1).n_bytes
    assert moved(3, Drafts(1, 1.0, mtp=True)) == pytest.approx(verify + draft)
    # one of the four is wanted
    verify = geometry.verify(4, 100, snapshots=3).n_bytes
    assert moved(2, Drafts(3, 1.0, mtp=False)) == pytest.approx(verify / 4)
    assert read(100, cached=True) == geometry.decode(99).n_bytes
    assert read(600, cached=False) == pytest.approx(sum(work.n_bytes for work in geometry.prefill(600)))


@pytest.mark.parametrize(
    ("count", "head", "snapshots"),
    [(8, True, 8), (9, True, 8), (1, False, 0)],
    ids=["fits", "long", "no head"],
)
def test_a_draft_longer_than_there_are_snapshots_goes_back_by_a_copy(
    count: int, head: bool, snapshots: int
) -> None:
    geometry, drafts = Geometry(tensors(draft=head)), Drafts(count, 0.5, mtp=False)
    assert drafts.snapshots(geometry) == snapshots
    *copies, verify = (work for work, _ in decode_passes(geometry, 64, 2, drafts))
    if count <= snapshots:
        assert not copies
        assert verify == geometry.verify(count + 1, 64, snapshots=snapshots)
        return
    wrong = 1 - 0.5**count
    (way_back,) = copies
    assert way_back.n_bytes == pytest.approx(2 * (1 + wrong) * STATE_BYTES)
    right = sum(0.5**i for i in range(1, count + 1)) - count * (1 - wrong)
    again = geometry.verify(count + 1 + right, 64, snapshots=snapshots)
    assert verify.operations == pytest.approx(again.operations), "what was right goes along once more"
    assert verify.n_bytes == pytest.approx(again.n_bytes)


def test_another_architecture_is_refused() -> None:
    with pytest.raises(BenchError, match="not the tensors of a Qwen"):
        Geometry([TensorInfo("blk.0.ffn_up.weight", (32, 32), Type.F16)])
    with pytest.raises(BenchError, match="no blocks"):
        Geometry([TensorInfo("token_embd.weight", (32, 32), Type.F16)])
