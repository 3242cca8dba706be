"""Our sampler against a plain reference with exact sums, and against the distributions it should have."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from qwen_serve.llamacpp.host_sampler import make_sampler
from qwen_serve.llamacpp.row_results import RowResult, Status
from qwen_serve.llamacpp.row_sampler import Filters, RowRequest, RowSampler, sample_rows
from tests.llamacpp.in_numpy import IN_NUMPY, builds, sampled

__all__ = ["builds"]  # a fixture

N = 248_320
Row = npt.NDArray[np.float32]

KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"ops": ("temperature",), "temperature": 0.8},
    "top_k": {"ops": ("top_k", "temperature"), "top_k": 40, "temperature": 1.3},
    "top_p": {"ops": ("top_p",), "top_p": 0.95},
    "min_p": {"ops": ("temperature", "min_p"), "min_p": 0.02, "temperature": 1.2},
    "typical": {"ops": ("typ_p",), "typical_p": 0.8},
    "top-n-sigma": {"ops": ("top_n_sigma",), "top_n_sigma": 1.5},
    "XTC": {"ops": ("xtc",), "xtc_probability": 1.0, "xtc_threshold": 0.03},
    "XTC at times": {"ops": ("top_k", "xtc"), "top_k": 50, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "the card's": {
        "ops": ("top_k", "temperature", "top_p"),
        "top_k": 20,
        "temperature": 0.7,
        "top_p": 0.8,
    },
    "all": {
        "ops": ("top_n_sigma", "top_k", "temperature", "typ_p", "top_p", "min_p", "xtc"),
        "top_n_sigma": 4.0,
        "top_k": 200,
        "temperature": 1.1,
        "typical_p": 0.95,
        "top_p": 0.9,
        "min_p": 0.01,
        "xtc_probability": 0.4,
        "xtc_threshold": 0.1,
    },
    "dynamic temperature": {
        "ops": ("temp_ext", "top_p"),
        "temperature": 0.9,
        "dynatemp_range": 0.6,
        "dynatemp_exponent": 0.7,
        "top_p": 0.95,
    },
    "top_k, dynamic temperature": {
        "ops": ("top_k", "temp_ext"),
        "top_k": 30,
        "temperature": 0.5,
        "dynatemp_range": 0.5,
        "dynatemp_exponent": 2.0,
    },
    "top_p, at least 25": {"ops": ("top_p",), "top_p": 0.1, "min_keep": 25},
    "min_p, at least 5": {"ops": ("min_p",), "min_p": 0.9, "min_keep": 5},
    "typical, at least 9": {"ops": ("typ_p",), "typical_p": 0.1, "min_keep": 9},
    "XTC, at least 3": {
        "ops": ("top_k", "xtc"),
        "top_k": 5,
        "xtc_probability": 1.0,
        "xtc_threshold": 0.05,
        "min_keep": 3,
    },
    "Mirostat": {"ops": ("temperature", "mirostat"), "temperature": 0.9, "mirostat_tau": 2.0},
    "Mirostat 2": {"ops": ("temperature", "mirostat_v2"), "temperature": 1.2, "mirostat_tau": 2.5},
    "temperature last": {
        "ops": ("top_k", "top_p", "min_p", "temperature"),
        "top_k": 100,
        "top_p": 0.9,
        "min_p": 0.02,
        "temperature": 1.7,
    },
}


def like_a_model(n: int = N, seed: int = 0) -> Row:
    """Logits of which a few dozen have nearly all the mass."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1.2, n)
    best = rng.choice(n, 60, replace=False)
    logits[best] += np.linspace(14, 8, 60)
    return logits.astype(np.float32)


def choose(sampler: RowSampler, logits: Row, **how: Any) -> RowResult:
    return sampled([RowRequest(sampler, **how)], [logits])[0]


def kept(logits: Row, coin: bool, **f: Any) -> dict[int, float]:
    """What the filters leave in double precision, and the probabilities; `coin`: whether XTC applies."""
    ids = np.lexsort((np.arange(len(logits)), -logits))
    values = logits[ids].astype(np.float64)
    scale, least = 1.0, f.get("min_keep", 0)

    def chances() -> npt.NDArray[np.float64]:
        found = np.exp((values - values.max()) * scale)
        return np.asarray(found / found.sum())

    for op in f["ops"]:
        p, keep = chances(), np.ones(len(ids), bool)
        if op == "temperature":
            scale = 1 / f["temperature"]
        elif op == "top_k":
            keep[f["top_k"] :] = False
        elif op == "top_p":
            keep = np.cumsum(p) - p < f["top_p"]
            keep[:least] = True
        elif op == "min_p":
            keep = p >= f["min_p"] * p.max()
            keep[:least] = True
        elif op == "temp_ext":
            share = -(p * np.log(np.maximum(p, 1e-300))).sum() / math.log(len(p)) if len(p) > 1 else 1.0
            low = max(0.0, f["temperature"] - f["dynatemp_range"])
            span = f["temperature"] + f["dynatemp_range"] - low
            scale = 1 / max(1e-9, low + span * share ** f["dynatemp_exponent"]) if len(p) > 1 else 1.0
        elif op == "mirostat_v2":
            keep = -np.log2(np.maximum(p, 1e-300)) <= 2 * f["mirostat_tau"]
            keep[0] = True
        elif op == "mirostat":
            steps = np.log(np.arange(2, 101) / np.arange(1, 100))[: len(p) - 1]
            falls = -np.diff(values[: len(steps) + 1]) * scale
            s = (steps * falls).sum() / (steps**2).sum()
            k = (s - 1) * 2 ** (2 * f["mirostat_tau"]) / (1 - len(logits) ** (1 - s))
            keep[max(1, int(k ** (1 / s))) :] = False
        elif op == "top_n_sigma":
            keep = values >= values.max() - f["top_n_sigma"] * values.std()
        elif op == "typ_p":
            surprise = -np.log(p, where=p > 0, out=np.full_like(p, -800.0))
            order = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
            out = np.cumsum(p[order]) - p[order] >= f["typical_p"]
            out[:least] = False
            keep[order[out]] = False
        elif coin:
            above = int(np.count_nonzero(p >= f["xtc_threshold"]))
            above = above if len(p) - above + 1 >= least else 0
            keep[: max(0, above - 1)] = False
        ids, values = ids[keep], values[keep]
    return dict(zip(ids.tolist(), chances().tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_draws_follow_the_distribution(name: str) -> None:
    """Binned by rank, of a whole vocabulary; fewer draws with filters that read the row several times."""
    logits, at_once, filters = like_a_model(), 50, KINDS[name]
    draws = 100_000 if filters["ops"][0] in ("top_k", "temperature") else 10_000
    samplers = [make_sampler(Filters(**filters, seed=seed), N) for seed in range(at_once)]
    counts: dict[int, int] = {}
    for _ in range(draws // at_once):
        # the noise of a row depends on the number of tokens before
        found = sampled([RowRequest(sampler) for sampler in samplers], [logits] * at_once)
        for sampler, token in zip(samplers, found.tokens, strict=True):
            sampler.accept(token)
            counts[token] = counts.get(token, 0) + 1
    share = filters.get("xtc_probability", 0.0)
    expected: dict[int, float] = {}
    for coin, weight in ((True, share), (False, 1 - share)):
        for token, p in kept(logits, coin, **filters).items() if weight else ():
            expected[token] = expected.get(token, 0.0) + weight * p
    assert set(counts) <= set(expected)
    ranked = sorted(expected, key=lambda token: -expected[token])
    bins: list[list[float]] = [[0.0, 0.0]]
    for token in ranked:  # a bin for each likely token, and for each lot of others
        if bins[-1][1] >= 50:
            bins.append([0.0, 0.0])
        bins[-1][0] += counts.get(token, 0)
        bins[-1][1] += draws * expected[token]
    if bins[-1][1] < 20 and len(bins) > 1:
        rest = bins.pop()
        bins[-1] = [bins[-1][0] + rest[0], bins[-1][1] + rest[1]]
    seen, wanted = (np.array(column) for column in zip(*bins, strict=True))
    if len(bins) == 1:
        assert seen[0] == draws
        return
    assert stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-4


@pytest.mark.parametrize("name", KINDS)
def test_nothing_else_is_drawn(name: str) -> None:
    """Over rows of many shapes; the distribution itself is a long test."""
    rng = np.random.default_rng(1)
    for trial in range(20):
        n = int(rng.integers(3, 2000))
        logits = rng.normal(0, rng.choice([0.01, 1.0, 4.0]), n).astype(np.float32)
        if trial % 4 == 0:
            logits = np.round(logits)
        sampler = make_sampler(Filters(**KINDS[name], seed=trial), n)
        token = choose(sampler, logits).token
        # at the edge of what is kept, double precision may differ by a token
        near = {**kept(logits, True, **KINDS[name]), **kept(logits, False, **KINDS[name])}
        least = min(float(logits[one]) for one in near)
        assert token in near or abs(float(logits[token]) - least) < 1e-3 or name == "typical"


# --- bit for bit -----------------------------------------------------------------------------------------

Q = 24
LAST = 44 << Q


def distance(logits: Row, best: np.float32, scale: np.float32) -> list[int]:
    far = (best - logits) * scale
    return [int(np.float32(one) * np.float32(2**Q)) if one < 63 else 63 << Q for one in far]


def mass(far: int) -> int:
    g, total = 2**Q - far % 2**Q, 235160
    for c in (1332284, 10392315, 59577496, 257943496, 744261073, 1073741824):
        total = c + (total * g >> Q)
    return total << 13 >> (far >> Q)


def mix32(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ x >> shift) * factor) % 2**32
    return x ^ x >> 16


def mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ x >> shift) * factor) % 2**64
    return x ^ x >> 31


def gumbel(seed: int, position: int, token: int) -> float:
    """The noise of a token, in binary logarithms."""
    row = mix64(mix64(seed) ^ mix64(position * 4))
    high = mix32(mix32((token + row) % 2**32) ^ row >> 32)
    low = mix32((high + (row >> 32) + 0x9E3779B9 * token) % 2**32)
    return -math.log2(-math.log1p(-((high << 32 | low) + 0.5) / 2**64))


def reference(logits: Row, top_p: float, seed: int, position: int) -> int:
    """Top-p and a draw with exact sums, by a full sort."""
    best = logits.max()
    far = distance(logits, best, np.float32(math.log2(math.e)))
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    total = sum(map(mass, far))
    need, reached, left = max(1, total * int(top_p * 2**32) >> 32), 0, []
    for token in order:
        if reached < need:
            left.append(token)
        reached += mass(far[token])
    scores = {
        token: gumbel(seed, position, token) - far[token] / 2**Q for token in left if far[token] <= LAST
    }
    return max(scores, key=lambda token: scores[token])


@IN_NUMPY
@pytest.mark.parametrize("shape", ["flat", "wide", "ties"])
def test_the_plain_reference_chooses_the_same(shape: str) -> None:
    rng = np.random.default_rng(2)
    for trial in range(15):
        logits = rng.normal(0, {"flat": 0.01, "wide": 4.0, "ties": 1.0}[shape], 600).astype(np.float32)
        if shape == "ties":
            logits = np.round(logits)
        top_p = float(rng.choice([0.05, 0.5, 0.95]))
        sampler = make_sampler(Filters(("top_p",), top_p=top_p, seed=trial), 600)
        for position in range(3):
            token = choose(sampler, logits).token
            assert token == reference(logits, top_p, trial, position), (trial, position)
            sampler.accept(token)


def test_threads_place_and_batch_make_no_difference() -> None:
    rows = [like_a_model(5000, seed) for seed in range(40)]
    names = list(KINDS)
    samplers = [make_sampler(Filters(**KINDS[names[i % len(names)]], seed=i), 5000) for i in range(40)]
    alone = [choose(sampler, row).token for sampler, row in zip(samplers, rows, strict=True)]
    requests = [RowRequest(sampler) for sampler in samplers]
    for n_threads in (1, 2, 5):
        assert sample_rows(requests, rows, n_threads).tokens == alone
    assert sample_rows(requests[::-1], rows[::-1], 3).tokens == alone[::-1]


@IN_NUMPY
@pytest.mark.parametrize("last_n", [None, -1, 3])
def test_rows_of_a_draft_count_what_comes_before_them(last_n: int | None) -> None:
    """Row j is sampled as if the draft's first j tokens had been accepted; the sampler stays as it was."""
    rng = np.random.default_rng(4)
    rows = [rng.normal(0, 2, 500).astype(np.float32) for _ in range(6)]
    draft = rng.integers(0, 40, 5).tolist()

    def make() -> RowSampler:
        sampler = make_sampler(Filters(("temperature",), seed=9, temperature=0.9), 500)
        sampler.penalise(1.4, 1.0, 0.5, last_n, [1, 2, 3, 4])
        sampler.ban([7], until=4)
        sampler.bad_word([draft[0], draft[1], 11])
        for token in (5, 2, 5):
            sampler.accept(token)
        return sampler

    one, expected = make(), []
    for row, token in zip(rows, [*draft, None], strict=True):
        expected.append(choose(one, row).token)
        if token is not None:
            one.accept(token)
    sampler = make()
    requests = [RowRequest(sampler, draft=token) for token in [*draft, -1]]
    for _ in range(2):
        assert sampled(requests, rows).tokens == expected
    assert choose(sampler, rows[0]).token == choose(make(), rows[0]).token


def test_the_same_noise_chooses_the_same_from_similar_logits() -> None:
    """So a drafter that draws with a request's noise is right far more often than one that takes the best."""
    rng, same, best, n = np.random.default_rng(5), 0, 0, 300
    for seed in range(n):
        logits = rng.normal(0, 1.5, 2000).astype(np.float32)
        others = logits + rng.normal(0, 0.7, 2000).astype(np.float32)
        sampler = make_sampler(Filters(("temperature",), seed=seed), 2000)
        right = choose(sampler, logits).token
        same += choose(sampler, others).token == right
        best += int(others.argmax()) == right
    assert same > 0.4 * n > 4 * best


# --- rules, penalties, broken rows -----------------------------------------------------------------------


@IN_NUMPY
@pytest.mark.parametrize("n_real", [1000, 1024])
def test_unusable_rows_have_no_token(n_real: int) -> None:
    sampler = make_sampler(Filters(("top_p",), top_p=0.9), n_real)
    good = np.ones(1024, np.float32)
    for broken in (np.nan, np.inf, -np.inf):
        row = good.copy()
        row[1023] = broken
        assert choose(sampler, row).status is Status.NOT_FINITE
    assert choose(sampler, 0 * good).status is Status.ZERO
    assert choose(sampler, good).status is Status.OK


@IN_NUMPY
def test_a_bias_on_every_token() -> None:
    logits, bias = like_a_model(2000), np.random.default_rng(1).normal(0, 9, 2000).astype(np.float32)
    sampler = make_sampler(Filters(("best",)), 2000)
    sampler.bias(enumerate(bias.tolist()))
    assert choose(sampler, logits).token == int((logits + bias).argmax())


@IN_NUMPY
@pytest.mark.parametrize("op", ["top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"])
def test_an_infinite_logit_has_all_the_mass(op: str) -> None:
    """Of a bias, or of a logit near the largest float with a penalty that makes it larger."""
    how: dict[str, Any] = {"top_n_sigma": 1.0, "top_k": 5, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.1}
    how |= {"xtc_probability": 1.0, "xtc_threshold": 0.1}
    logits = like_a_model(3000)
    logits[[70, 90]] = 3e38, -3e38
    for bias, penalty, token in ((np.inf, 1.0, 50), (-np.inf, 1.0, 70), (0.0, 0.5, 70)):
        sampler = make_sampler(Filters((op, "temperature"), **how, seed=1), 3000)
        sampler.bias([(50, bias), (60, bias)])
        sampler.penalise(penalty, 0.0, 0.0, None, [70, 90])
        assert choose(sampler, logits).token == token
    sampler.bias([(token, -np.inf) for token in range(3000)])
    assert choose(sampler, logits).status is Status.NONE_LEFT


@IN_NUMPY
def test_bans_that_leave_nothing() -> None:
    sampler = make_sampler(Filters(("best",)), 4)
    sampler.allow([1])
    sampler.ban([1], until=2)
    row = np.ones(4, np.float32)
    assert choose(sampler, row).status is Status.NONE_LEFT
    sampler.accept(0)
    sampler.accept(0)
    assert choose(sampler, row).token == 1
    assert choose(sampler, row, mask=np.array([0b1101], np.uint32)).status is Status.NONE_LEFT


@IN_NUMPY
def test_of_equal_tokens_the_lowest_ids() -> None:
    row = np.zeros(300, np.float32)
    row[[7, 50, 290]] = 1
    assert choose(make_sampler(Filters(("best",)), 300), row).token == 7
    for seed in range(20):
        drawn = choose(make_sampler(Filters(("top_k",), top_k=2, seed=seed), 300), row).token
        assert drawn in (7, 50)
    result = choose(make_sampler(Filters(("best",)), 300), row, n_top=5)
    assert result.best.tolist() == [7, 50, 290, 0, 1]
    assert choose(make_sampler(Filters(("best",)), 300), row, n_top=0, scored=290).rank == 3


@IN_NUMPY
@pytest.mark.parametrize("last_n", [None, -1, 5])
def test_penalties_equal_their_definition(last_n: int | None) -> None:
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(0, 60, 30).tolist(), rng.integers(0, 60, 80).tolist()
    sampler = make_sampler(Filters(("best",)), 60)
    sampler.penalise(1.3, 0.7, -0.2, last_n, prompt)
    for length, token in enumerate(output):
        logits = rng.normal(size=60).astype(np.float32)
        seen = output[:length] if last_n is None else [*prompt, *output[:length]]
        seen = seen if last_n is None or last_n < 0 else seen[-last_n:]
        expected = logits.astype(np.float64)
        for i in range(60):
            count = seen.count(i)
            if count or (last_n is None and i in prompt):
                expected[i] = expected[i] / 1.3 if expected[i] > 0 else expected[i] * 1.3
            expected[i] -= 0.7 - 0.2 * count if count else 0
        assert choose(sampler, logits).token == int(expected.argmax())
        sampler.accept(token)


@IN_NUMPY
def test_log_probabilities() -> None:
    logits = like_a_model()
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum())
    sampler = make_sampler(Filters(("best",)), N)
    sampler.bias([(5, 100.0)])
    result = choose(sampler, logits, n_top=20)
    assert result.token == 5
    assert result.logprob == pytest.approx(exact[5], abs=1e-6)
    assert result.rank == 1 + int((logits > logits[5]).sum() + (logits[:5] == logits[5]).sum())
    assert result.best.tolist() == np.lexsort((np.arange(N), -logits))[:20].tolist()
    np.testing.assert_allclose(result.best_logprobs, exact[result.best], atol=1e-6)


@IN_NUMPY
def test_seeds() -> None:
    row = np.ones(1000, np.float32)

    def answer(seed: int) -> list[int]:
        sampler = make_sampler(Filters(("temperature",), seed=seed), 1000)
        found = []
        for _ in range(20):
            found.append(choose(sampler, row).token)
            sampler.accept(found[-1])
        return found

    assert answer(7) == answer(7)
    assert len({tuple(answer(seed)) for seed in (0, 1, -1, 2**32, 2**63)}) == 5
    assert len(set(answer(7))) > 15
