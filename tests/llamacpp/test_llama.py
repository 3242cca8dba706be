"""The wrapper of llama.cpp: batches, positions, memory, errors, log."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_serve.llamacpp import (
    Context,
    Model,
    Ring,
    devices,
    row_bytes,
    takes_rows,
    tapped_log,
)
from qwen_serve.llamacpp.errors import LlamaError, NoMemorySlot
from qwen_serve.server.engine import Vocab
from tests.contexts import exact_options

OPTIONS = exact_options(n_ctx=256, n_batch=64, n_outputs=64, n_seq=2)


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    context = Context(model, OPTIONS)
    yield context
    context.close()


def decode(context: Context, tokens: list[int], start: int = 0, sequence: int = 0) -> np.ndarray:
    n = len(tokens)
    context.tokens[:n] = tokens
    context.positions[:n] = range(start, start + n)
    context.sequences[:n] = sequence
    context.outputs[:n] = 1
    context.decode(n)
    return context.logits(n).copy()


def test_positions_are_those_of_text(context: Context) -> None:
    """Multi-section rope takes one position a text token: the same text in pieces gives the same logits."""
    tokens = list(range(300, 350))
    whole = decode(context, tokens)
    context.clear()
    pieces = [decode(context, tokens[i : i + 9], i) for i in range(0, 50, 9)]
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=1e-4)
    context.clear()
    elsewhere = decode(context, tokens, start=100)
    assert np.abs(elsewhere[0] - whole[0]).max() < 1e-4  # attends only to itself


def test_a_removed_sequence_leaves_no_trace(context: Context) -> None:
    expected = decode(context, [300, 301, 302])
    context.remove(0)
    decode(context, list(range(400, 440)))
    context.remove(0)
    np.testing.assert_allclose(decode(context, [300, 301, 302]), expected, atol=1e-5)


def test_sequences_do_not_see_each_other(context: Context) -> None:
    expected = decode(context, [300, 301, 302])
    decode(context, list(range(400, 440)), sequence=1)
    context.remove(0)
    np.testing.assert_allclose(decode(context, [300, 301, 302]), expected, atol=1e-4)


def test_a_full_cache_is_an_error_of_its_own_and_changes_nothing(context: Context) -> None:
    for start in range(0, 256, 64):
        decode(context, [300] * 64, start)
    with pytest.raises(NoMemorySlot):
        decode(context, [300], 0, sequence=1)
    context.remove(0)
    decode(context, [300], 0, sequence=1)


def test_what_goes_into_layers_is_there_after_it_was_switched_off_for_a_while(context: Context) -> None:
    """A graph without it, which every step of one token could use, must not be taken for one with it."""
    layers, tokens = [1, 2], [5, 6, 7, 8, 9, 10]
    context.keep_layers(layers)
    decode(context, tokens)
    expected = context.layer_inputs(layers, range(len(tokens)))
    for keep in (False, True, True, False, True):
        context.keep_layers(layers, keep)
        context.clear()
        for at, token in enumerate(tokens):
            decode(context, [token], at)
            if keep:
                [given] = context.layer_inputs(layers, [0])
                assert given == pytest.approx(expected[at], abs=1e-4)


def test_a_batch_that_does_not_continue_its_sequence_is_refused(context: Context) -> None:
    decode(context, [300, 301], 0)
    with pytest.raises(LlamaError, match="returned -1"):
        decode(context, [302], start=0)


@pytest.mark.parametrize("n", [0, 65])
def test_a_batch_has_a_size(context: Context, n: int) -> None:
    with pytest.raises(LlamaError, match="1 to 64"):
        context.decode(n)


def test_a_batch_has_no_more_outputs_than_promised(model: Model) -> None:
    from dataclasses import replace

    context = Context(model, replace(OPTIONS, n_outputs=2))
    with pytest.raises(LlamaError, match="3 outputs"):
        decode(context, [300, 301, 302])
    context.close()


def test_the_prediction_head_is_not_loaded(nano_f32: Path) -> None:
    with tapped_log():
        model = Model(nano_f32, n_gpu_layers=0, use_mmap=False)
    loaded = next(line for line in model.log if "model buffer size" in line)
    size = float(loaded.split("=")[1].split()[0]) * 1024**2
    assert size < model.size_bytes - 2 * 1024**2
    model.close()


def test_rows_of_quantized_types_have_their_block_sizes() -> None:
    assert [row_bytes(t, 256) for t in (0, 1, 8, 12, 14)] == [1024, 512, 272, 144, 210]
    assert row_bytes(999, 256) == 0


def test_the_host_is_a_device() -> None:
    host = devices()[-1]
    assert not host.is_gpu
    assert host.total >= host.free > 0


def test_the_token_embedding_goes_where_it_is_wanted(nano_f32: Path, context: Context) -> None:
    expected = decode(context, [300, 301, 302])
    model = Model(nano_f32, n_gpu_layers=0, embedding_on=devices()[-1].name, use_mmap=False)
    assert [line for line in model.log if "token_embd.weight" in line and "overridden to CPU" in line]
    elsewhere = Context(model, OPTIONS)
    np.testing.assert_array_equal(decode(elsewhere, [300, 301, 302]), expected)
    elsewhere.close()
    model.close()


def test_a_processor_takes_rows_of_every_type() -> None:
    assert takes_rows(devices()[-1].name, 14, 256)  # Q6_K


def test_a_device_that_is_not_there_is_refused(nano_f32: Path) -> None:
    with pytest.raises(LlamaError, match="no device is named CUDA99"):
        takes_rows("CUDA99", 14, 256)
    with pytest.raises(LlamaError, match="no device is named CUDA99"):
        Model(nano_f32, embedding_on="CUDA99")


def test_the_log_goes_to_python(nano_f32: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="llama.cpp"):
        Model(nano_f32, n_gpu_layers=0).close()
    assert any("general.architecture" in message for message in caplog.messages)
    assert {record.levelno for record in caplog.records} <= {5, logging.DEBUG}, "loading should not shout"


# --- vocabulary --------------------------------------------------------------------------------------------


@pytest.fixture
def vocab(model: Model) -> Vocab:
    return Vocab(model)


TEXTS = ["Hello world", "Grüße, 你好! 👋🏽", " leading", "line\n\nbreak\t\t", "a\x00b", "12345 + 67 = ?", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_tokenization(vocab: Vocab, text: str) -> None:
    ids = vocab.tokenize(text, special=False)
    assert b"".join(vocab.token_bytes(i) for i in ids).decode() == text


def test_control_tokens_are_found_only_when_asked_for(vocab: Vocab) -> None:
    text = "<|im_end|>"
    (token,) = vocab.tokenize(text, special=True)
    assert token in vocab.eog_ids
    assert vocab.token_bytes(token) == b""
    plain = vocab.tokenize(text, special=False)
    assert token not in plain
    assert b"".join(vocab.token_bytes(i) for i in plain).decode() == text


def test_added_tokens_name_all_that_llama_cpp_looks_for(vocab: Vocab) -> None:
    assert {"<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>"} <= set(vocab.added_tokens)
    for text in vocab.added_tokens:
        assert len(vocab.tokenize(text, special=True)) == 1


def test_a_lone_surrogate_becomes_a_question_mark(vocab: Vocab) -> None:
    assert vocab.tokenize("a\ud800b", special=False) == vocab.tokenize("a?b", special=False)


def test_ids_outside_the_vocabulary_are_refused(vocab: Vocab) -> None:
    for token in (-1, vocab.size):
        with pytest.raises(ValueError, match=str(token)):
            vocab.token_bytes(token)


def test_padding_starts_after_the_last_real_token(vocab: Vocab) -> None:
    assert 0 < vocab.n_real < vocab.size
    assert max(vocab.eog_ids) < vocab.n_real
    assert vocab.eos_id in vocab.eog_ids
    assert vocab.bos_id is None


@pytest.mark.parametrize("unified", [True, False])
def test_buffers_have_room_for_any_pass_of_few_tokens(
    model: Model, unified: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of more sequences than such a pass has tokens, and with recurrent states in place and elsewhere."""
    context = Context(
        model, exact_options(n_ctx=80 * 64, n_seq=80, n_batch=128, n_outputs=128, unified=unified)
    )
    for position, sequences in enumerate((range(60), range(60), range(59, -1, -1), range(0, 60, 2))):
        n = len(sequences)
        context.tokens[:n], context.positions[:n], context.sequences[:n] = 100, position, sequences
        context.outputs[:n] = 1
        context.decode(n)
        context.wait()
    with caplog.at_level(logging.WARNING, logger="llama.cpp"):
        context.close()
    assert not [message for message in caplog.messages if "compute buffer" in message]


def test_with_cells_of_their_own_a_copy_is_made_in_the_next_decode(model: Model) -> None:
    options = replace(OPTIONS, n_ctx=4 * 256, n_seq=4, n_outputs=8, unified=False)
    context = Context(model, options)
    try:
        assert (context.n_ctx, context.n_ctx_seq) == (1024, 256)
        alone = decode(context, [300, 301, 302])
        context.copy(0, 2)
        with pytest.raises(LlamaError, match="copied to in the next decode"):
            context.save(2)
        with pytest.raises(LlamaError, match="copied to in the next decode"):
            context.restore(2, context.save(0))
        decode(context, [303], start=3, sequence=2)
        saved = context.save(2)
        context.restore(3, saved)
        again = decode(context, [304], start=4, sequence=3)
        assert np.array_equal(again, decode(context, [304], start=4, sequence=2))
        assert np.array_equal(alone, decode(context, [300, 301, 302], sequence=1))
    finally:
        context.close()


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), min_size=1, max_size=6),
    st.integers(0, 40),
)
def test_a_ring_has_the_newest_rows_of_each_sequence(pieces: list[tuple[int, int]], start: int) -> None:
    """Those of a batch that are put there, each in a place of its own; others where nobody reads."""
    ring = Ring(3, 16)
    at = dict.fromkeys(range(5), start)
    tokens = []
    for sequence, n in pieces:
        tokens += [(sequence, at[sequence] + i) for i in range(n)]
        at[sequence] += n
    sequences, positions = (np.array(column, np.int32) for column in zip(*tokens, strict=True))
    rows = ring.rows(sequences, positions)
    kept = rows != ring.n_rows - 1
    assert len(set(rows[kept].tolist())) == kept.sum()
    assert rows.min() >= 0
    for (sequence, position), row, is_kept in zip(tokens, rows.tolist(), kept.tolist(), strict=True):
        assert is_kept == (sequence < 3 and position >= at[sequence] - 16)
        if is_kept:
            own, place = np.array([sequence], np.int32), np.array([position], np.int32)
            assert ring.rows(own, place).tolist() == [row], "it is found where it was put"


def test_texts_of_all_tokens_together_are_those_of_each(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = [model.piece(token, special=True) for token in range(model.n_vocab)]
    monkeypatch.setattr(Model, "_spelled", None)
    assert together == [model.piece(token, special=True) for token in range(model.n_vocab)]
