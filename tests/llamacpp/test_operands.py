"""A verification leaves a state as it is; its accepted tokens are folded into it before it is read again."""

import struct

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen_serve.llamacpp import HAS_STATE_F16, Context, Model
from qwen_serve.llamacpp.context import HAS_BATCH_INVARIANCE
from qwen_serve.llamacpp.operands import HAS_OPERANDS
from tests.contexts import exact_options

History = tuple[int, ...]
Rows = dict[History, npt.NDArray[np.float32]]

IDS = 6
ROWS = 5
"""Longest verification."""
PLACES = 3
"""Sequences whose operands fit; with more the oldest are folded."""


N_RECURRENT, BELOW_ATTENTION = 6, 3
"""Nano's recurrent layers, and how many of them lie below the first attention."""


def recurrent_state(opened: Context, which: int) -> list[npt.NDArray[np.float32]]:
    """The convolution's state of each recurrent layer, then the delta net's (`state_write` in
    llama-memory-recurrent.cpp)."""
    # `save` has keys and values, too, whose order is not a sequence's own
    saved = opened._save(which, C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY).tobytes()  # noqa: SLF001
    at, found = 28, []  # behind the position and the numbers of cells, ids and layers
    for _ in range(2 * N_RECURRENT):
        kind, size = struct.unpack_from("<iQ", saved, at)
        at += 12
        found.append(np.frombuffer(saved[at : at + size], (np.float32, np.float16)[kind]).astype(np.float32))
        at += size
    assert at == len(saved)
    return found


def context(model: Model, *, rows: int = ROWS, places: int = PLACES, state_type: str = "f32") -> Context:
    options = exact_options(
        n_ctx=1024,
        n_batch=64,
        n_outputs=64,
        n_seq=IDS,
        batch_invariant=True,
        n_operands=rows,
        operand_sequences=places,
        state_type=state_type,
    )
    return Context(model, options)


class Sequences:
    """Sequences of a context, with the row of every token that was computed."""

    def __init__(self, opened: Context) -> None:
        self.context = opened
        self.held: dict[int, History] = {}
        self.rows: list[tuple[History, npt.NDArray[np.float32]]] = []

    def decode(self, parts: dict[int, list[int]], *, only_last: frozenset[int] = frozenset()) -> None:
        """Read these tokens; those of `only_last` have an output of their last one only."""
        n, wanted = 0, []
        for which, tokens in parts.items():
            at = self.held.get(which, ())
            for i, token in enumerate(tokens):
                self.context.tokens[n], self.context.positions[n] = token, len(at)
                self.context.sequences[n] = which
                self.context.outputs[n] = which not in only_last or i == len(tokens) - 1
                at += (token,)
                if self.context.outputs[n]:
                    wanted.append(at)
                n += 1
            self.held[which] = at
        self.context.decode(n)
        for history, row in zip(wanted, self.context.logits(len(wanted)), strict=True):
            self.rows.append((history, row.copy()))

    def take_back(self, which: int, n: int) -> bool:
        kept = len(self.held[which]) - n
        if n and not self.context.remove(which, kept):
            return False
        self.held[which] = self.held[which][:kept]
        return True

    def copy(self, source: int, target: int) -> None:
        self.context.remove(target)
        self.context.copy(source, target)
        self.held[target] = self.held[source]

    def check(self, model: Model, *, exactly: bool = False, state_type: str = "f32") -> None:
        """Each row, and each state, is that of a sequence that reads its tokens one by one. Attention adds up
        cells in their order in the pool, which is not that of a sequence alone. So without `exactly` only
        the states below the first attention have its bits."""
        wanted = [history for history, _ in self.rows]
        alone, states = alone_one_by_one(model, wanted, [*self.held.values()], state_type)
        for history, row in self.rows:
            np.testing.assert_allclose(row, alone[history], atol=0 if exactly else 1e-4, rtol=0)
        for which, history in self.held.items():
            pairs = zip(recurrent_state(self.context, which), states[history], strict=True)
            for place, (state, expected) in enumerate(pairs):
                below = place % N_RECURRENT < BELOW_ATTENTION
                np.testing.assert_allclose(state, expected, atol=0 if exactly or below else 1e-4, rtol=0)


def alone_one_by_one(
    model: Model, wanted: list[History], ends: list[History], state_type: str = "f32"
) -> tuple[Rows, dict[History, list[npt.NDArray[np.float32]]]]:
    opened = context(model, rows=0, state_type=state_type)
    rows: Rows = {}
    states: dict[History, list[npt.NDArray[np.float32]]] = {}
    for history in sorted({*wanted, *ends}, key=len, reverse=True):
        if history in rows and history not in ends:
            continue
        opened.remove(0)
        one = Sequences(opened)
        for token in history:
            one.decode({0: [token]})
        rows.update(one.rows)
        states[history] = recurrent_state(opened, 0)
    opened.close()
    return rows, states


@pytest.fixture(autouse=True)
def _needs_the_patch() -> None:
    if not HAS_OPERANDS or not HAS_BATCH_INVARIANCE:
        pytest.skip("llama.cpp has no patch operand-verification")


def tokens(rng: np.random.Generator, n: int) -> list[int]:
    return [int(one) for one in rng.integers(256, 2000, n)]


@pytest.mark.parametrize("state_type", ["f32", "f16"])
def test_any_number_of_tokens_is_accepted(model: Model, state_type: str) -> None:
    if state_type == "f16" and not HAS_STATE_F16:
        pytest.skip("llama.cpp has no patch state-f16")
    opened = context(model, state_type=state_type)
    assert opened.n_operands == ROWS
    rng = np.random.default_rng(1)
    sequences = Sequences(opened)
    sequences.decode({0: tokens(rng, 9)}, only_last=frozenset({0}))
    for taken in range(ROWS + 1):
        sequences.decode({0: tokens(rng, ROWS)})
        assert sequences.take_back(0, taken)
    sequences.check(model, exactly=True, state_type=state_type)
    opened.close()


def test_what_cannot_be_taken_back_stays(model: Model) -> None:
    opened = context(model)
    rng = np.random.default_rng(2)
    sequences = Sequences(opened)
    sequences.decode({0: tokens(rng, 9)})  # too long to be a verification
    assert not sequences.take_back(0, 1)
    sequences.decode({0: tokens(rng, 3)})
    assert not sequences.take_back(0, 4)
    assert sequences.take_back(0, 1)
    assert sequences.take_back(0, 1)
    assert not sequences.take_back(0, 2)
    sequences.copy(0, 1)
    assert not sequences.take_back(0, 1)  # sequence 1 has the token, too
    sequences.decode({1: tokens(rng, 1)})
    sequences.decode({0: tokens(rng, 3)}, only_last=frozenset({0}))  # the end of a prompt
    assert not sequences.take_back(0, 1)
    sequences.check(model)
    opened.close()


def test_operands_of_more_sequences_than_fit_are_folded(model: Model) -> None:
    opened = context(model, places=2)
    rng = np.random.default_rng(3)
    sequences = Sequences(opened)
    for which in range(4):
        sequences.decode({which: tokens(rng, 3)})
    assert not sequences.take_back(1, 1)
    assert sequences.take_back(2, 1)
    assert sequences.take_back(3, 2)
    sequences.decode({which: tokens(rng, 1) for which in range(4)})
    sequences.check(model)
    opened.close()


def test_a_restored_state_has_no_operands_of_before(model: Model) -> None:
    opened = context(model)
    rng = np.random.default_rng(4)
    sequences = Sequences(opened)
    sequences.decode({0: tokens(rng, 9)}, only_last=frozenset({0}))
    saved, held = opened.save(0), sequences.held[0]
    sequences.decode({0: tokens(rng, 4)})
    opened.restore(0, saved)
    sequences.held[0] = held
    sequences.decode({0: tokens(rng, 1)})
    sequences.check(model)
    opened.close()


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_states_are_those_of_one_by_one(model: Model, seed: int) -> None:
    opened = context(model, places=IDS)
    rng = np.random.default_rng(seed)
    sequences = Sequences(opened)
    for _ in range(12):
        held = [which for which, history in sequences.held.items() if 0 < len(history) < 50]
        match rng.integers(8):
            case 0:
                which = int(rng.integers(IDS))
                sequences.decode({which: tokens(rng, int(rng.integers(1, 12)))}, only_last=frozenset({which}))
            case 1 if len(held) > 0:
                source, target = int(rng.choice(held)), int(rng.integers(IDS))
                if source != target:
                    sequences.copy(source, target)
            case 2 if len(held) > 0:
                source, target = int(rng.choice(held)), int(rng.integers(IDS))
                opened.restore(target, opened.save(source))
                sequences.held[target] = sequences.held[source]
            case 3 if len(held) > 0:
                which = int(rng.choice(held))
                opened.remove(which)
                del sequences.held[which]
            case _ if len(held) > 0:
                verified = [int(one) for one in rng.permutation(held)[: rng.integers(1, IDS + 1)]]
                parts = {one: tokens(rng, int(rng.integers(1, ROWS + 1))) for one in verified}
                if rng.integers(3) == 0:  # beside the chunk of a prompt
                    parts[verified[0]] = tokens(rng, int(rng.integers(2, 9)))
                    last = frozenset({verified[0]})
                else:
                    last = frozenset()
                sequences.decode(parts, only_last=last)
                for one, part in parts.items():
                    if one not in last and len(part) > 1:
                        assert sequences.take_back(one, int(rng.integers(len(part) + 1)))
            case _:
                pass
    sequences.check(model)
    opened.close()
