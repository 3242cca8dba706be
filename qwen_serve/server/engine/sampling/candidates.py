"""Chooses a token from a row's best tokens alone, and decides what the device must return of a row."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.llamacpp import N_CANDIDATES, DeviceSampler
from qwen_serve.llamacpp.guessed_draws import Draw
from qwen_serve.llamacpp.rows import READS_LOGITS

from .processors import LogitRules

if TYPE_CHECKING:
    import numpy.typing as npt

    from qwen_serve.llamacpp import SamplerChain

    from .constraint import Constraint
    from .parameters import SamplingParams
MARGIN = 1e-4
"""Maximum error of llama.cpp's sums of probabilities in F32."""


def device_sampler_for(
    params: SamplingParams, *, penalised: bool, only_lowers: bool, constrained: bool, ends: int, banned: int
) -> DeviceSampler:
    """The narrowest device sampler that suffices for a request. `banned` of the `ends`, the tokens that end a
    generation, are not allowed. `only_lowers`: no penalty raises a logit."""
    if LogitRules.wanted(params) or not only_lowers:
        return DeviceSampler.ROW  # any token may become the best
    if 0 < banned < ends:
        return DeviceSampler.ROW  # the device bans all ends or none
    logprobs = params.logprobs is not None
    if params.prompt_logprobs is not None or (logprobs and constrained):
        return DeviceSampler.ROW  # a prompt's token, or a forced one, may not be among the best
    if penalised and (logprobs or constrained):
        return DeviceSampler.ROW  # neither may the best one left
    if (penalised or constrained) and not READS_LOGITS:
        return DeviceSampler.ROW  # the candidates may not suffice, and this build returns no further logits
    if params.is_greedy and not logprobs and not penalised:
        return DeviceSampler.TOP_K if constrained else DeviceSampler.BEST
    if not params.is_greedy and params.chain[:1] != ("top_k",):
        return DeviceSampler.ROW
    top_k = 1 if params.is_greedy else params.top_k
    wanted = top_k + banned + (logprobs or penalised)  # one more, as a bound for the rest
    if wanted > N_CANDIDATES:
        return DeviceSampler.ROW
    return DeviceSampler.LOGPROBS if logprobs else DeviceSampler.TOP_K


def can_guess(params: SamplingParams) -> bool:
    """Whether the device can guess the draws of a request with these filters and nothing more. These filters
    always draw with a random number, so that penalties, say, or log-probabilities do not change a draw."""
    order = ("top_k", "temperature", "top_p", "min_p")
    if params.is_greedy or params.chain != tuple(name for name in order if name in params.chain):
        return False
    return 0 < params.top_k <= N_CANDIDATES and not params.dynatemp_range and params.min_keep <= 1


def draw_of(params: SamplingParams, *, no_ends: bool) -> Draw | None:
    """How TOP_K can guess the draws of a request that needs no wider device sampler; None if it cannot."""
    if params.is_greedy:
        return Draw(top_k=1, temperature=1, top_p=1, min_p=0, no_ends=no_ends)
    if not can_guess(params):
        return None
    return Draw(params.top_k, params.temperature, params.top_p, params.min_p, no_ends)


def choose_among(
    ids: npt.NDArray[np.integer],
    logits: npt.NDArray[np.float32],
    lowest: float,
    params: SamplingParams,
    chain: SamplerChain | None,
    constraint: Constraint | None,
) -> int | None:
    """The token that the whole row would give, chosen from its best tokens [n]. None if these do not
    determine it. Every other token has a logit of at most `lowest`.

    A greedy choice offers the best tokens to the constraint one by one, which is faster than computing its
    mask. A draw needs the mask.
    """
    if chain is None:
        at = logits.argmax()
        best = logits[at]
        equal = logits == best
        token = int(ids[at] if np.count_nonzero(equal) == 1 else ids[equal].min())
        if best > lowest and (constraint is None or constraint.accept(token)):
            return token
        return None if constraint is None else _best_allowed(ids, logits, lowest, constraint)
    if constraint is None and lowest == -math.inf:
        return chain.draw(ids, logits)
    mask = None if constraint is None else constraint.mask()
    if mask is not None:
        keep = mask[ids]
        n_kept = np.count_nonzero(keep)
        if n_kept == len(ids):
            lowest = -math.inf  # top-k takes only these, as without a constraint
        else:
            ids, logits = ids[keep], logits[keep]
    if lowest > -math.inf:
        known = logits > lowest
        above = logits[known]
        if is_settled(params, above, lowest):
            ids, logits = ids[known], above
        elif mask is None or n_kept < np.count_nonzero(mask):
            return None
    if mask is not None and (not len(ids) or logits.max() == -np.inf):
        return None
    token = chain.draw(ids, logits)
    if constraint is not None:
        constraint.accept(token)
    return token


def _best_allowed(
    ids: npt.NDArray[np.integer], logits: npt.NDArray[np.float32], lowest: float, constraint: Constraint
) -> int | None:
    order = np.lexsort((ids, -logits))  # among equal logits the lowest id first
    for token, logit in zip(ids[order].tolist(), logits[order].tolist(), strict=True):
        if logit <= lowest:
            break
        if constraint.accept(token):
            return int(token)
    return None


def is_settled(params: SamplingParams, known: npt.NDArray[np.float32], lowest: float) -> bool:
    """Whether the `known` logits alone decide which tokens the samplers keep. Top-k comes first, then top-p
    and min-p.

    All other tokens have logits of at most `lowest`, which is below the known ones. They make no difference
    if top-k has enough known tokens, or if top-p or min-p drops them. Top-p drops them if it keeps the same
    tokens when the others have no mass as when they have as much as `lowest` allows.
    """
    if len(known) >= params.top_k or not len(known):
        return len(known) > 0
    temperature = _temperature_at_top_p(params)
    if temperature is None:
        return False
    logits = sorted(known.tolist(), reverse=True)
    weights = [math.exp((logit - logits[0]) / temperature) for logit in logits]
    least = math.exp((lowest - logits[0]) / temperature)
    kept = n = len(weights)
    if params.top_p < 1.0:
        masses = list(accumulate(weights))
        reach = (params.top_p + MARGIN) * (masses[-1] + (params.top_k - n) * least)
        kept = 1 + bisect_left(masses, (params.top_p - MARGIN) * masses[-1])
        if masses[-1] >= reach and kept == 1 + bisect_left(masses, reach):
            return True
    bound = params.min_p * (1 - MARGIN)
    return least < bound and sum(weight >= bound for weight in weights) <= kept


def _temperature_at_top_p(params: SamplingParams) -> float | None:
    """The temperature before top-p and min-p; None if the chain has another form."""
    for middle, last in ((("temperature",), ()), ((), ("temperature",))):
        order = ("top_k", *middle, "top_p", "min_p", *last)
        if params.chain == tuple(name for name in order if name in params.chain):
            if params.dynatemp_range or params.min_keep > 1:
                return None
            return params.temperature if middle and "temperature" in params.chain else 1.0
    return None


def best_of(logits: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.intp]:
    """Ids of the `k` highest of many logits [n], unordered; all of them if there are no more.
    Of equal ones the lowest ids count.

    The logits are cut into blocks. At least k logits reach the k-th highest of the blocks' maxima, and few
    exceed it. Finding this bound reads every logit once, while a partial sort would move them.
    """
    width = 256
    n_blocks = len(logits) // width
    if k >= len(logits):
        return np.arange(len(logits))
    ids = np.arange(len(logits))
    if n_blocks > 4 * k:
        maxima = logits[: n_blocks * width].reshape(n_blocks, width).max(axis=1)
        ids = np.flatnonzero(logits >= np.partition(maxima, -k)[-k])
    if len(ids) <= k:
        return ids
    few = logits[ids]
    least = np.partition(few, -k)[-k]
    above = ids[few > least]
    return np.concatenate([above, ids[few == least][: k - len(above)]])
