"""Samplers against llama.cpp's: the same candidates from the same logits."""

import ctypes
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np
import pytest

from qwen_serve.llamacpp import Model, host_sampler
from qwen_serve.llamacpp.row_sampler import HAS_ROW_SAMPLER
from qwen_serve.server.engine.sampling import (
    LLAMA_CPP_SAMPLERS,
    DrySamplers,
    Sampler,
    SamplingParams,
)
from qwen_serve.server.engine.vocab import Vocab
from tests.server.engine.helpers import EXACT, Question, ask, random_prompt, running
from tests.server.engine.sampling.fake_rows import SmallVocab, choose
from tests.server.engine.sampling.test_processors import SHAPES

CONTEXT = 64
SEED = 11

LETTER = 65
"""A token: that of a letter, as the next ones are."""

PROMPT = [LETTER + at for at in (1, 2, 3, 4, 5, 1, 2, 3, 6, 1, 2)] * 3


class Reference:
    """A chain as llama-server builds it (common_sampler_init in llama.cpp's common/sampling.cpp), over
    SmallVocab's tokens."""

    def __init__(self, params: SamplingParams, model: Model, prompt: list[int]) -> None:
        p, keep = params, params.min_keep
        self._chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        breakers = [text.encode() for text in p.dry_sequence_breakers]
        texts = (ctypes.c_char_p * len(breakers))(*breakers)
        last_n = CONTEXT if p.repeat_last_n in (None, -1) else p.repeat_last_n
        penalties = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
        dry_n = CONTEXT if p.dry_penalty_last_n == -1 else p.dry_penalty_last_n
        dry = p.dry_multiplier, p.dry_base, p.dry_allowed_length, dry_n
        make = {
            "penalties": lambda: C.llama_sampler_init_penalties(SmallVocab.size, last_n, *penalties),
            "dry": lambda: C.llama_sampler_init_dry(model._vocab, *dry, texts, len(texts)),  # noqa: SLF001 - a handle
            "top_n_sigma": lambda: C.llama_sampler_init_top_n_sigma(p.top_n_sigma),
            "top_k": lambda: C.llama_sampler_init_top_k(p.top_k),
            "typ_p": lambda: C.llama_sampler_init_typical(p.typical_p, keep),
            "top_p": lambda: C.llama_sampler_init_top_p(p.top_p, keep),
            "min_p": lambda: C.llama_sampler_init_min_p(p.min_p, keep),
            "xtc": lambda: C.llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, keep, SEED),
            "temperature": lambda: C.llama_sampler_init_temp_ext(
                p.temperature, p.dynatemp_range, p.dynatemp_exponent
            ),
        }
        if p.mirostat:
            made = [C.llama_sampler_init_temp(p.temperature)]
            if p.mirostat == 1:
                made.append(
                    C.llama_sampler_init_mirostat(SmallVocab.size, SEED, p.mirostat_tau, p.mirostat_eta, 100)
                )
            else:
                made.append(C.llama_sampler_init_mirostat_v2(SEED, p.mirostat_tau, p.mirostat_eta))
        else:
            made = [make[name]() for name in p.samplers] + [C.llama_sampler_init_dist(SEED)]
        for sampler in made:
            C.llama_sampler_chain_add(self._chain, sampler)
        for token in prompt:
            C.llama_sampler_accept(self._chain, token)

    def sample(self, logits: np.ndarray[Any, Any]) -> tuple[int, dict[int, float]]:
        """(token, remaining candidates with their probabilities)."""
        data = (C.llama_token_data * len(logits))()
        for token, logit in enumerate(logits.tolist()):
            data[token].id, data[token].logit = token, logit
        array = C.llama_token_data_array(data=data, size=len(logits), selected=-1, sorted=False)
        C.llama_sampler_apply(self._chain, ctypes.byref(array))
        return array.data[array.selected].id, candidates(array)

    def accept(self, token: int) -> None:
        C.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        C.llama_sampler_free(self._chain)


def candidates(array: Any) -> dict[int, float]:
    """The candidates that a chain leaves, without those of negligible probability."""
    found = ((array.data[at].id, array.data[at].p) for at in range(array.size))
    return {token: p for token, p in found if p > 1e-30}


WARM = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama-server's defaults, nearly."""

CASES: dict[str, dict[str, Any]] = {
    "typical": {"typical_p": 0.5},
    "typical among all": {"typical_p": 0.5, "top_k": 0},
    "typical, cold": {"typical_p": 0.3, "temperature": 0.2},
    "top-n-sigma": {"top_n_sigma": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "top-n-sigma before top-k": {"top_n_sigma": 0.7},
    "XTC": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    "XTC that keeps three": {"xtc_probability": 1.0, "xtc_threshold": 0.02, "min_keep": 3},
    "dynamic temperature": {"dynatemp_range": 0.5, "dynatemp_exponent": 1.3},
    "dynamic temperature from 0": {"temperature": 0.5, "dynatemp_range": 0.5},
    "XTC, then cold": {"xtc_probability": 1.0, "temperature": 0.0, "samplers": LLAMA_CPP_SAMPLERS},
    "mirostat": {"mirostat": 1, "mirostat_tau": 3.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2, "presence_penalty": 1.0},
    "DRY": {"dry_multiplier": 5.0},
    "DRY of everything": {"dry_multiplier": 0.8, "dry_penalty_last_n": -1, "dry_allowed_length": 1},
    "DRY with breakers": {"dry_multiplier": 5.0, "dry_sequence_breakers": ("e", "the "), "dry_base": 1.2},
    "DRY that sees little": {"dry_multiplier": 5.0, "dry_penalty_last_n": 7},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "repeat_last_n": 16},
    "penalties of everything": {"presence_penalty": 0.7, "repetition_penalty": 1.2, "repeat_last_n": -1},
    "penalties of nothing": {"presence_penalty": 0.7, "repeat_last_n": 0},
    "penalties that raise": {"presence_penalty": -0.7, "repetition_penalty": 0.8, "repeat_last_n": 5},
    "without most": {"samplers": ("top_k", "xtc"), "xtc_probability": 1.0, "dry_multiplier": 9.0},
    "in another order": {
        "samplers": ("dry", "penalties", "min_p", "top_p", "temperature", "typ_p", "top_k"),
        "dry_multiplier": 3.0,
        "repetition_penalty": 1.2,
        "repeat_last_n": 32,
        "typical_p": 0.8,
    },
    "all": {
        "samplers": LLAMA_CPP_SAMPLERS,
        "dry_multiplier": 3.0,
        "repetition_penalty": 1.2,
        "repeat_last_n": 32,
        "top_n_sigma": 3.0,
        "typical_p": 0.9,
        "xtc_probability": 0.3,
        "xtc_threshold": 0.02,
        "dynatemp_range": 0.3,
    },
}


def rows(count: int) -> Iterator[np.ndarray[Any, Any]]:
    """Rows in which few tokens are likely, mostly the same ones, so that texts repeat themselves."""
    rng = np.random.default_rng(3)
    for _ in range(count):
        logits = rng.normal(0, 2, SmallVocab.size).astype(np.float32)
        logits[rng.integers(LETTER, LETTER + 5, 5)] += 7
        logits[999] = -50  # ends the generation
        yield logits


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_same_as_llama_cpp(
    name: str, model: Model, monkeypatch: pytest.MonkeyPatch, *, stock: bool
) -> None:
    if stock:
        monkeypatch.setattr(host_sampler, "HAS_ROW_SAMPLER", False)
    params = SamplingParams(**{**WARM, "seed": SEED, **CASES[name]})
    vocab = cast("Vocab", SmallVocab())
    dries = DrySamplers(model, CONTEXT)
    reference = Reference(params, model, PROMPT)
    ours = Sampler(params, vocab, PROMPT, dry=dries.of(params))
    for number, logits in enumerate(rows(CONTEXT - len(PROMPT))):
        _, left = reference.sample(logits[: SmallVocab.n_real])
        token = choose(ours, logits)
        if params.mirostat and number:
            break  # what it keeps depends on the draws before
        if params.xtc_probability in (0, 1):  # our sampler draws by other numbers
            assert token in left, number
        reference.accept(token)
    for each in (reference, ours):
        each.close()


@pytest.mark.skipif(not HAS_ROW_SAMPLER, reason="this llama.cpp has no row sampler")
@pytest.mark.parametrize("order", [("penalties", "dry"), ("dry", "penalties")])
def test_dry_is_applied_where_rows_are_sampled(order: tuple[str, ...], model: Model) -> None:
    """Before the penalties or after them, as the request says."""
    params = SamplingParams(
        temperature=0.0,
        dry_multiplier=3.0,
        dry_allowed_length=1,
        repetition_penalty=1.5,
        repeat_last_n=-1,
        samplers=(*order, "temperature"),
    )
    dries = DrySamplers(model, CONTEXT)
    reference = Reference(params, model, PROMPT)
    ours = Sampler(params, cast("Vocab", SmallVocab()), PROMPT, dry=dries.of(params))
    for number, logits in enumerate(rows(CONTEXT - len(PROMPT))):
        chosen, _ = reference.sample(logits[: SmallVocab.n_real])
        assert choose(ours, logits) == chosen, number
        reference.accept(chosen)
    for each in (reference, ours):
        each.close()


@pytest.mark.parametrize("name", CASES)
def test_each_makes_a_difference(name: str, model: Model) -> None:
    """Each sampler changes something, so no case passes because nothing happens."""
    chains = [Reference(SamplingParams(**{**WARM, **case}), model, PROMPT) for case in (CASES[name], {})]
    found = []
    for row in rows(CONTEXT - len(PROMPT)):
        found.append([chain.sample(row) for chain in chains])
        for chain, (token, _) in zip(chains, found[-1], strict=True):
            chain.accept(token)
    assert (name == "penalties of nothing") == all(one == other for one, other in found)
    for chain in chains:
        chain.close()


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0.0, "xtc_probability": 1.0, "typical_p": 0.5}, True),
        ({"temperature": 0.0, "xtc_probability": 1.0, "samplers": LLAMA_CPP_SAMPLERS}, False),
        ({"temperature": 0.0, "typical_p": 0.5, "samplers": LLAMA_CPP_SAMPLERS}, False),
        ({"temperature": 0.0, "top_n_sigma": 1.0, "top_k": 5, "samplers": LLAMA_CPP_SAMPLERS}, True),
        ({"temperature": 0.0, "dynatemp_range": 0.5}, False),
        ({"temperature": 1.0, "top_k": 1, "xtc_probability": 1.0}, True),
        ({"temperature": 0.0, "mirostat": 2}, True),
        ({"temperature": 0.0, "samplers": ("top_k",)}, False),
    ],
)
def test_what_is_greedy(fields: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**fields).is_greedy is greedy


@pytest.mark.parametrize(
    "fields",
    [
        {"repeat_last_n": -2},
        {"typical_p": 1.5},
        {"top_n_sigma": float("nan")},
        {"xtc_probability": -0.1},
        {"xtc_threshold": 2.0},
        {"dynatemp_range": -1.0},
        {"mirostat": 3},
        {"mirostat_tau": float("inf")},
        {"dry_multiplier": -1.0},
        {"dry_base": 0.5},
        {"dry_sequence_breakers": ("",)},
        {"min_keep": -1},
        {"samplers": ("top_k", "tfs_z")},
        {"samplers": ("top_k", "top_k")},
        {"samplers": ("top_k", "penalties")},
    ],
)
def test_nonsense_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        SamplingParams(**fields)


def test_what_cannot_be_is_no_candidate(model: Model) -> None:
    """Otherwise the logarithm of 0 would change the choice of typical sampling."""
    params = SamplingParams(temperature=1.0, typical_p=0.9, seed=1, allowed_token_ids=(1, 2, 3))
    sampler = Sampler(params, cast("Vocab", SmallVocab()), [])
    chosen = {choose(sampler, np.zeros(SmallVocab.size, np.float32) + 1) for _ in range(60)}
    assert chosen == {1, 2, 3}
    sampler.close()


def test_samplers_of_the_same_kind_are_made_once(model: Model) -> None:
    dries = DrySamplers(model, CONTEXT)
    params = SamplingParams(dry_multiplier=1.0)
    first, second = dries.of(params), dries.of(params)
    assert first is not None
    assert second is not None
    assert len(dries._made) == 1  # noqa: SLF001 - memory
    assert dries.of(SamplingParams(dry_multiplier=1.0, samplers=("top_k",))) is None
    ids = np.arange(LETTER, LETTER + 4)
    for token in (1, 2, 3, 1, 2):
        first.accept(LETTER + token)
    assert first.less(ids).tolist() == [0, 0, 0, 1]
    assert not second.less(ids).any(), "what one has seen the other has not"


IN_THE_ENGINE: dict[str, dict[str, Any]] = {
    "DRY": {"temperature": 0.0, "dry_multiplier": 4.0, "dry_allowed_length": 1},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "repeat_last_n": 12},
    "XTC": {"xtc_probability": 0.7, "xtc_threshold": 0.05, "samplers": LLAMA_CPP_SAMPLERS},
    "mirostat": {"mirostat": 2, "mirostat_tau": 1.0},
    "top-n-sigma": {"top_n_sigma": 1.0, "top_k": 0},
}


async def test_drafts_change_nothing(nano_f32: Path) -> None:
    """A sampler's state depends on the chosen tokens, not on drafted ones."""
    prompt = random_prompt(random.Random(2), 9) * 6
    answers: list[dict[str, list[int]]] = []
    for shape in SHAPES.values():
        with running(nano_f32, **EXACT, **shape) as engine:
            found = {}
            for name, fields in IN_THE_ENGINE.items():
                params = SamplingParams(**{**WARM, "seed": SEED, "ignore_eos": True, **fields})
                found[name] = (await ask(engine, Question(prompt, 40, params=params))).tokens
            answers.append(found)
    assert answers[0] == answers[1] == answers[2]
    assert len(set(map(tuple, answers[0].values()))) == len(IN_THE_ENGINE)
