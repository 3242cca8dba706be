"""The graph's results for a row agree with the row's logits."""

from __future__ import annotations

import ctypes
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np
import pytest

from qwen_serve.llamacpp import (
    N_CANDIDATES,
    Context,
    DeviceSampler,
    Model,
    Rows,
    ggml,
    supports_gpu,
)
from qwen_serve.llamacpp.device_sampler import DeviceSamplers, n_blocks
from qwen_serve.llamacpp.devices import _dev_get
from qwen_serve.llamacpp.rows import READS_LOGITS, best_but_ends, best_tokens, guesses, log_sums
from qwen_serve.server.engine.sampling import Sampler, SamplingParams
from qwen_serve.server.engine.sampling.logprobs import Logprobs, Scores, log_softmax
from qwen_serve.server.engine.vocab import Vocab
from qwen_serve.server.engine.warmup import time_prompt, warm_up
from tests.contexts import exact_options

if TYPE_CHECKING:
    import numpy.typing as npt

N_SEQ = 3
LENGTH = 60
"""Tokens of each sequence, all of them outputs: together they fill several slabs, the last one in part."""


def make(model: Model, kind: DeviceSampler | None) -> Context:
    return Context(
        model,
        exact_options(
            n_ctx=256,
            n_batch=256,
            n_outputs=256,
            n_seq=N_SEQ + 1,
            n_outputs_per_seq=LENGTH,
            n_samplers=0 if kind is None else N_SEQ,
            sampler=kind or DeviceSampler.BEST,
        ),
    )


def decode(context: Context, length: int = LENGTH) -> Rows:
    """The first `length` tokens of each sequence, from scratch."""
    context.clear()
    n = N_SEQ * length
    tokens = np.random.default_rng(0).integers(256, 2000, (N_SEQ, LENGTH))
    sequences = np.repeat(np.arange(N_SEQ), length)
    context.tokens[:n] = tokens[:, :length].ravel()
    context.positions[:n] = np.tile(np.arange(length), N_SEQ)
    context.sequences[:n] = sequences
    context.outputs[:n] = 1
    context.decode(n)
    return context.rows(sequences.tolist(), range(n))


@pytest.fixture(scope="module")
def logits(model: Model) -> npt.NDArray[np.float32]:
    context = make(model, None)
    rows = decode(context)
    found = np.stack([rows.logits(row) for row in range(len(rows))]).copy()
    context.close()
    assert model.n_real < model.n_vocab, "the model must have padding for this to mean anything"
    found.setflags(write=False)
    return found


def allowed(model: Model, logits: npt.NDArray[np.float32], ends: bool) -> npt.NDArray[np.float32]:
    copy = logits.copy()
    copy[:, model.n_real :] = -np.inf
    if not ends:
        copy[:, sorted(model.eog_ids)] = -np.inf
    return copy


def test_the_best_token(model: Model, logits: npt.NDArray[np.float32]) -> None:
    context = make(model, DeviceSampler.BEST)
    rows = decode(context)
    expected = allowed(model, logits, ends=True).argmax(axis=1).tolist()
    assert rows.all_best() == expected
    assert [rows.best(row) for row in range(len(rows))] == expected
    without = allowed(model, logits, ends=False).argmax(axis=1).tolist()
    assert [rows.best_but_end(row) for row in range(len(rows))] == without
    context.close()


def test_what_is_banned_does_not_come_back(model: Model, logits: npt.NDArray[np.float32]) -> None:
    """The masks themselves: with every token but one banned, that is the best everywhere."""
    only = 300
    narrow = Model.__new__(Model)
    narrow.__dict__.update(model.__dict__, n_real=only + 1, eog_ids=frozenset(range(only)))
    context = make(narrow, DeviceSampler.BEST)
    rows = decode(context)
    assert rows.all_best() == logits[:, : only + 1].argmax(axis=1).tolist()
    assert [rows.best_but_end(row) for row in range(len(rows))] == [only] * len(rows)
    context.close()


@pytest.mark.parametrize(("sortable", "k"), [(10_000, 64), (1024, 64), (100, 8), (30, 2)])
def test_candidates_are_the_best_tokens_with_their_logits(
    model: Model, logits: npt.NDArray[np.float32], sortable: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sorted as a whole, and by blocks, once, twice or more."""
    monkeypatch.setattr("qwen_serve.llamacpp.top_k.SORTABLE", sortable)
    for module in ("device_sampler", "rows"):
        monkeypatch.setattr(f"qwen_serve.llamacpp.{module}.N_CANDIDATES", k)
    context = make(model, DeviceSampler.TOP_K)
    rows = decode(context)
    real = allowed(model, logits, ends=True)
    assert rows.all_best() is None
    for row in range(len(rows)):
        ids, values = rows.candidates(row)
        assert len(ids) == k
        assert set(ids.tolist()) == set(np.argsort(-real[row])[:k].tolist())
        np.testing.assert_array_equal(values, real[row][ids])
    context.close()


def test_a_guess_knows_how_likely_it_is(model: Model, logits: npt.NDArray[np.float32]) -> None:
    context = make(model, DeviceSampler.GUESS)
    rows = decode(context)
    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    assert [rows.best(row) for row in range(len(rows))] == logits.argmax(axis=1).tolist()
    found = [rows.probability(row) for row in range(len(rows))]
    np.testing.assert_allclose(found, chances.max(axis=1), rtol=1e-5)
    context.close()


def test_log_probabilities_of_candidates(model: Model, logits: npt.NDArray[np.float32]) -> None:
    """Those of the softmax over the whole row, with ranks and the likeliest: what the row itself tells."""
    context = make(model, DeviceSampler.LOGPROBS)
    rows = decode(context)
    device, whole = (Logprobs(SamplingParams(logprobs=20), model.n_real) for _ in range(2))
    for row in range(len(rows)):
        token = int(np.argsort(-logits[row][: model.n_real])[row % N_CANDIDATES])
        found = device.scores(rows, row)
        assert rows.candidates(row)[0].size == N_CANDIDATES
        assert rows.log_sum(row) == pytest.approx(np.log(np.exp(logits[row].astype(float)).sum()), abs=1e-5)
        device.add(found, token)
        whole.add(Scores(None, log_softmax(logits[row])), token)
    assert len({told.rank for told in whole.tokens}) > 10
    for mine, reference in zip(device.tokens, whole.tokens, strict=True):
        assert (mine.token, mine.rank) == (reference.token, reference.rank)
        assert mine.best.tolist() == reference.best.tolist()
        assert mine.logprob == pytest.approx(reference.logprob, abs=1e-5)
        np.testing.assert_allclose(mine.best_logprobs, reference.best_logprobs, atol=1e-5)
    context.close()


def test_each_sequence_has_its_own_device_sampler_and_may_get_another(
    model: Model, logits: npt.NDArray[np.float32]
) -> None:
    context = make(model, DeviceSampler.BEST)
    others = (DeviceSampler.TOP_K, DeviceSampler.LOGPROBS, DeviceSampler.GUESS)
    for kind in (DeviceSampler.ROW, *others, DeviceSampler.ROW):
        context.set_sampler(1, kind)
        for length in (1, 7, LENGTH):  # graphs of other shapes in between
            rows = decode(context, length)
            assert (
                rows.kinds == [DeviceSampler.BEST] * length + [kind] * length + [DeviceSampler.BEST] * length
            )
            for row in range(length):
                assert rows.best(row) == allowed(model, logits, ends=True)[row].argmax()
                if kind is DeviceSampler.ROW:
                    # the shape of a batch moves logits by some 1e-6
                    np.testing.assert_allclose(rows.logits(length + row), logits[LENGTH + row], atol=1e-4)
    context.set_samplers(None)
    rows = decode(context)
    np.testing.assert_array_equal(np.stack([rows.logits(row) for row in range(len(rows))]), logits)
    context.set_samplers(DeviceSampler.BEST)
    assert decode(context).all_best() == allowed(model, logits, ends=True).argmax(axis=1).tolist()
    context.close()


def test_prompts_and_decodes_in_one_batch(model: Model, logits: npt.NDArray[np.float32]) -> None:
    """Ubatches of different lengths, some without a row to read."""
    context = make(model, DeviceSampler.BEST)
    tokens = np.random.default_rng(0).integers(256, 2000, (N_SEQ, LENGTH))
    # one token of sequence 0, then nine of sequence 1 of which the last gives a row
    context.tokens[:10] = [tokens[0, 0], *tokens[1, :9]]
    context.positions[:10] = [0, *range(9)]
    context.sequences[:10] = [0] + [1] * 9
    context.outputs[:10] = [1] + [0] * 8 + [1]
    context.decode(10)
    best = allowed(model, logits, ends=True).argmax(axis=1)
    assert context.rows([0, 1], [0, 9]).all_best() == [best[0], best[LENGTH + 8]]
    context.close()


@pytest.mark.parametrize("kind", [None, DeviceSampler.BEST])
def test_a_step_behind_a_prompt_has_the_graph_of_the_step_before(
    model: Model, kind: DeviceSampler | None
) -> None:
    """And whole rows are those of the last pass, not of the graph that was built last."""
    if not READS_LOGITS:
        pytest.skip("llama.cpp has no patch steps-apart")
    tokens = np.random.default_rng(1).integers(256, 2000, 100)
    context = make(model, kind)

    def row(sequence: int, start: int, end: int) -> npt.NDArray[np.float32]:
        n = end - start
        context.tokens[:n], context.positions[:n] = tokens[start:end], np.arange(start, end)
        context.sequences[:n], context.outputs[:n] = sequence, 0
        context.outputs[n - 1] = 1
        context.decode(n)
        rows = context.rows([sequence], [n - 1])
        return (rows.logits(0) if kind is None else rows.fetch(0)).copy()

    def step(end: int) -> npt.NDArray[np.float32]:
        return row(0, end - 1, end)

    row(0, 0, 20)
    alone = [step(21), step(22), step(23)]
    context.remove(0)
    row(0, 0, 20)
    step(21)
    built = step(22)
    reused = context.graphs_reused
    prompt = row(1, 0, 100)
    behind = step(23)
    assert context.graphs_reused == reused + 1
    np.testing.assert_allclose(built, alone[1], atol=1e-4)
    np.testing.assert_allclose(behind, alone[2], atol=1e-4)
    context.remove(1)
    np.testing.assert_allclose(row(1, 0, 100), prompt, atol=1e-4)
    context.close()


def test_a_device_is_asked_for_every_operation(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; plain host memory belongs to no device, and nothing would be asked."""
    cpu = _dev_get(0)
    supports = ggml.supports_op
    monkeypatch.setattr(ggml, "device_of", lambda _buffer_type: cpu)
    monkeypatch.setattr(
        ggml, "supports_op", lambda device, op: operation(op) != "ARGMAX" and supports(device, op)
    )
    context = make(model, DeviceSampler.BEST)
    assert "has no ARGMAX" in context.samplers.refused
    context.close()
    monkeypatch.setattr(ggml, "supports_op", supports)
    context = make(model, DeviceSampler.TOP_K)
    assert not context.samplers.refused
    assert len(decode(context, 4).logits(0)) == model.n_vocab
    context.close()


LIBRARY = Path(C._lib._name).with_name("libggml-cpu.so")  # noqa: SLF001 - ctypes' own name for it


def operation(tensor: int) -> str:
    return str(ggml.op_name(ggml.Tensor.from_address(tensor).op).decode())


def test_too_many_ends_for_a_row_stay_with_the_host(model: Model) -> None:
    ended = Model.__new__(Model)
    ended.__dict__.update(model.__dict__, eog_ids=frozenset(range(model.n_real - 1)))
    context = make(ended, DeviceSampler.BEST)
    assert "no room" in context.samplers.refused
    assert decode(context, 1).logits(0).shape == (model.n_vocab,)
    context.close()


def computed(
    kind: DeviceSampler, logits: npt.NDArray[np.float32], ends: list[int], n_real: int, *, exact: bool = False
) -> npt.NDArray[np.float32]:
    """The figures that the graph finds for any logits, without a model in front of it. `exact`: those of BEST
    begin with the next step's token."""
    logits, (n, n_vocab) = np.ascontiguousarray(logits), logits.shape
    model = SimpleNamespace(n_vocab=n_vocab, n_real=n_real, eog_ids=frozenset(ends))
    samplers = DeviceSamplers(cast("Model", model), 1, kind, ahead=exact, exact=exact)
    buffer_type = ggml.quick("ggml_backend_cpu_buffer_type", ctypes.c_void_p)()
    samplers._constants = samplers._place(buffer_type)  # noqa: SLF001 - a model would limit what is tried
    memory = ggml.init(ggml.InitParams(40 * logits.nbytes + 2**20, None, False))
    whole = ggml.new_tensor(memory, ggml.F32, n_vocab, n)
    ctypes.memmove(ggml.Tensor.from_address(whole).data, logits.ctypes.data, logits.nbytes)
    outputs = samplers._outputs(memory, kind, whole, n)  # noqa: SLF001 - likewise
    graph = ggml.quick("ggml_new_graph", ctypes.c_void_p, ctypes.c_void_p)(memory)
    ggml.quick("ggml_build_forward_expand", None, ctypes.c_void_p, ctypes.c_void_p)(graph, outputs.figures)
    compute: Any = ctypes.CDLL(str(LIBRARY)).ggml_graph_compute_with_ctx
    compute.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    assert compute(memory, graph, 1) == 0
    found = np.empty((n, outputs.width), np.float32)
    ctypes.memmove(found.ctypes.data, ggml.Tensor.from_address(outputs.figures).data, found.nbytes)
    ggml.free(memory)
    samplers.close()
    return found


@pytest.mark.parametrize("n_vocab", [97, 31 * 32, 3712, 248_320])
@pytest.mark.parametrize("n_ends", [0, 5])
def test_any_logits(n_vocab: int, n_ends: int) -> None:
    """What the graph and the host find together; one row of three is spoilt."""
    rng, n_real = np.random.default_rng(n_vocab), n_vocab - n_vocab // 20
    ends = sorted(rng.permutation(n_real)[:n_ends].tolist())
    logits = rng.normal(0, 3, (3, n_vocab)).astype(np.float32)
    logits[0, ends] += 20
    logits[:, n_real:] = 50  # the padding would win
    blocks = n_blocks(n_vocab)
    real = logits[:, :n_real].copy()
    clean = computed(DeviceSampler.BEST, logits, ends, n_real)
    best = best_tokens(clean, blocks)
    assert best.tolist() == real.argmax(axis=1).tolist()
    sums = logits.reshape(3, blocks, -1).sum(axis=2, dtype=float)
    np.testing.assert_allclose(clean[:, -blocks:], sums, rtol=1e-4, atol=1e-2)
    real[:, ends] = -np.inf
    assert best_but_ends(clean, blocks).tolist() == real.argmax(axis=1).tolist()

    tokens, found = guesses(
        computed(DeviceSampler.GUESS, logits[:, :n_real], [], n_real), n_real // n_blocks(n_real)
    )
    assert tokens.tolist() == logits[:, :n_real].argmax(axis=1).tolist()
    chances = np.exp(logits[:, :n_real].astype(float))
    np.testing.assert_allclose(found, (chances / chances.sum(axis=1, keepdims=True)).max(axis=1), rtol=1e-4)

    exact = np.log(np.exp(logits.astype(float)).sum(axis=1))
    np.testing.assert_allclose(
        log_sums(computed(DeviceSampler.LOGPROBS, logits, ends, n_real)), exact, rtol=1e-6
    )

    for spoilt in (np.nan, np.inf, -np.inf):
        logits[1, n_vocab // 3] = spoilt
        for kind in (DeviceSampler.BEST, DeviceSampler.TOP_K):
            sums = computed(kind, logits, ends, n_real)[:, -blocks:]
            assert np.isfinite(sums).all(axis=1).tolist() == [True, False, True]
        if spoilt != -np.inf:
            _, found = guesses(computed(DeviceSampler.GUESS, logits, [], n_vocab), n_vocab // blocks)
            assert np.isfinite(found).tolist() == [True, False, True]
            found = log_sums(computed(DeviceSampler.LOGPROBS, logits, ends, n_real))
            assert np.isfinite(found).tolist() == [True, False, True]
    logits[1] = np.nan
    figures = computed(DeviceSampler.BEST, logits, ends, n_real)
    assert best_tokens(figures, blocks)[[0, 2]].tolist() == best[[0, 2]].tolist()
    assert np.isfinite(figures[:, -blocks:]).all(axis=1).tolist() == [True, False, True]


def test_what_serves_what() -> None:
    assert DeviceSampler.ROW.serves(DeviceSampler.TOP_K)
    assert DeviceSampler.TOP_K.serves(DeviceSampler.BEST)
    assert DeviceSampler.BEST.serves(DeviceSampler.BEST)
    assert not DeviceSampler.BEST.serves(DeviceSampler.TOP_K)
    assert not DeviceSampler.TOP_K.serves(DeviceSampler.ROW)
    for less in (DeviceSampler.BEST, DeviceSampler.TOP_K):
        assert DeviceSampler.LOGPROBS.serves(less)
        assert not less.serves(DeviceSampler.LOGPROBS)
    for other in DeviceSampler:
        assert DeviceSampler.GUESS.serves(other) == (other is DeviceSampler.GUESS)
        assert DeviceSampler.ROW.serves(other)


def test_draws_from_candidates_follow_the_distribution(model: Model, logits: npt.NDArray[np.float32]) -> None:
    """Top-k, temperature, top-p and min-p by the book, against 20,000 draws from the device's candidates."""
    params = SamplingParams(temperature=1.5, top_k=12, top_p=0.9, min_p=0.05, seed=3)
    context = make(model, DeviceSampler.TOP_K)
    rows = decode(context, 1)
    sampler = Sampler(params, Vocab(model), [1])
    drawn = [sampler.sample(rows, 0) for _ in range(20_000)]
    sampler.close()
    context.close()

    real = allowed(model, logits[:1], ends=True)[0].astype(float)
    ids = np.argsort(-real)[:12]
    chances = np.exp((real[ids] - real[ids[0]]) / 1.5)
    chances /= chances.sum()
    kept = int(np.searchsorted(np.cumsum(chances), 0.9)) + 1
    chances[kept:] = 0
    chances[chances < 0.05 * chances[0]] = 0
    chances /= chances.sum()
    assert (chances > 0).sum() > 2
    shares = np.array([drawn.count(token) for token in ids.tolist()]) / len(drawn)
    assert shares.sum() == pytest.approx(1)
    # five standard deviations of a share
    assert (np.abs(shares - chances) <= 5 * np.sqrt(chances * (1 - chances) / len(drawn))).all()


def test_the_warm_up_keeps_samplers_that_are_right(model: Model) -> None:
    context = make(model, DeviceSampler.BEST)
    warm_up(context, [1, N_SEQ], 32)
    assert context.samplers.active
    assert time_prompt(context, 32, perf_counter) > 0
    context.close()


def test_the_warm_up_gives_up_samplers_that_are_wrong(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    narrow = Model.__new__(Model)  # bans almost everything
    narrow.__dict__.update(model.__dict__, n_real=3)
    context = make(narrow, DeviceSampler.BEST)
    context.samplers.n_real = model.n_real
    warm_up(context, [1, N_SEQ], 32)
    assert "not the best ones" in caplog.text
    assert not context.samplers.active
    assert decode(context).logits(0).shape == (model.n_vocab,)
    context.close()


@pytest.mark.gpu
@pytest.mark.skipif(not supports_gpu(), reason="no GPU, or llama-cpp-python built without CUDA")
def test_a_gpu_reads_out_the_same(nano_f16: Path) -> None:
    """Every kind, against the rows themselves in a batch of the same shape."""
    model = Model(nano_f16)
    context = make(model, DeviceSampler.ROW)
    rows = decode(context)
    whole = np.stack([rows.logits(row) for row in range(len(rows))]).copy()
    real, going_on = allowed(model, whole, ends=True), allowed(model, whole, ends=False)
    close = 0.02 * float(whole.std())
    context.set_samplers(DeviceSampler.BEST)
    rows = decode(context)
    for row in range(len(rows)):
        assert real[row].max() - real[row][rows.best(row)] <= close
        assert going_on[row].max() - going_on[row][rows.best_but_end(row)] <= close
    context.set_samplers(DeviceSampler.TOP_K)
    rows = decode(context)
    for row in range(len(rows)):
        ids, values = rows.candidates(row)
        assert len(set(ids.tolist())) == N_CANDIDATES
        np.testing.assert_allclose(values, real[row][ids], atol=close)
        assert np.sort(real[row])[-N_CANDIDATES] - values.min() <= close
    context.set_samplers(DeviceSampler.LOGPROBS)
    rows = decode(context)
    for row in range(len(rows)):
        ids, values = rows.candidates(row)
        np.testing.assert_allclose(values, real[row][ids], atol=close)
        highest = float(whole[row].max())
        total = highest + np.log(np.exp(whole[row].astype(float) - highest).sum())
        assert rows.log_sum(row) == pytest.approx(total, abs=close)
    context.set_samplers(DeviceSampler.GUESS)
    rows = decode(context)
    for row in range(len(rows)):
        chance = 1 / np.exp(whole[row] - whole[row].max()).sum()
        assert rows.probability(row) == pytest.approx(chance, rel=0.05)
    context.close()
    model.close()
