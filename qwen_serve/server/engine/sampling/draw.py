"""One request's sampler: its parameters as rules, penalties and filters of rows, and what comes next."""

import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import islice, takewhile

from qwen_serve.llamacpp import DrySampler
from qwen_serve.llamacpp.host_sampler import make_sampler
from qwen_serve.llamacpp.row_results import RowResult, Status
from qwen_serve.llamacpp.row_sampler import NO_LOGITS, Bits, Filters, RowRequest, RowSampler
from qwen_serve.server.engine.errors import NoTokenLeft
from qwen_serve.server.engine.sampling.rows import Rows
from qwen_serve.server.engine.vocab import Vocab

from .constraint import Constraint
from .dry import Dry
from .logprobs import Logprobs
from .parameters import SamplingParams
from .thinking import ThinkingWatch

NONE_LEFT = (
    "allowed_token_ids, bad_words, logit_bias, min_tokens and ignore_eos leave no token to choose; allow more"
)


class Sampler:
    """Chooses the tokens of one sequence. It survives preemption, so a seeded draw continues where it was.

    With a `constraint`, the choice is as if all tokens that may not come next had a logit of -inf.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab: Vocab,
        prompt: Sequence[int],
        constraint: Constraint | None = None,
        thinking: ThinkingWatch | None = None,
        dry: DrySampler | None = None,
    ) -> None:
        """`dry` must be new and belong to this answer only; required if the request uses DRY."""
        self.params = params
        self._constraint, self._thinking = constraint, thinking
        self._dry = None if dry is None else Dry(dry, params, vocab.n_real, prompt)
        self.noise = _row_sampler(params, vocab, prompt)
        """What drafters choose with, too: drafts by the same noise are likelier to be accepted."""
        self._within = -1
        """The number of the penalties within the think block; -1: there are none."""
        if thinking is not None and (penalty := thinking.limits.repetition_penalty) != 1.0:
            self._within = self.noise.penalise(penalty, 0.0, 0.0, None, [])
        self._usual = [RowRequest(self.noise)]
        """Requests for a step without a draft."""
        self._forced: deque[int] = deque()
        """Tokens that come next regardless of the model."""
        if constraint is not None:
            self._force(constraint.forced())

    def constrained(self, draft: Sequence[int]) -> tuple[Constraint, Sequence[int]] | None:
        """The constraint whose masks `requests` needs, and the part of the draft that it has not accepted."""
        if self._constraint is None or len(self._forced) > len(draft):
            return None
        return self._constraint, draft[len(self._forced) :]

    def requests(self, draft: Sequence[int], n_top: int, masks: Sequence[Bits]) -> list[RowRequest]:
        """Requests for the row after the pending tokens, and for those after each token of a draft. `n_top`:
        the likeliest tokens with log-probabilities, or -1 for none. `masks`: for what `constrained` gives."""
        plain = not masks and self._within < 0 and self._dry is None
        if plain and not self._forced and not draft:  # nearly all
            if self._usual[0].n_top != n_top:
                self._usual = [RowRequest(self.noise, n_top=n_top)]
            return self._usual
        made = [self.request_score(token, n_top) for token in islice(self._forced, len(draft) + 1)]
        if len(made) > len(draft):
            return made
        if self._within >= 0 and self._thinking is not None:
            self.noise.set_active(self._within, self._thinking.open)
        rest = draft[len(made) :]
        for i in range(len(rest) + 1):
            mask, token = masks[i] if i < len(masks) else None, rest[i] if i < len(rest) else -1
            lowered = None if self._dry is None else self._dry.lowered(rest[:i])
            made.append(RowRequest(self.noise, mask=mask, n_top=n_top, draft=token, lowered=lowered))
        return made

    def request_score(self, token: int, n_top: int) -> RowRequest:
        """A request for the log-probability of a `token` that follows the row whatever is chosen."""
        return RowRequest(self.noise, n_top=n_top, scored=token)

    def choose(self, rows: Rows, row: int, logprobs: Logprobs | None = None) -> int | None:
        """The next token, from a decoded row. Its log-probabilities are added to `logprobs`.

        None if the row was not kept, or if it was sampled before a token was forced whose log-probability is
        wanted. Raises FloatingPointError if the logits are unusable, NoTokenLeft, and what the constraint
        raises.
        """
        result = self._checked(rows.result(row), constrained=self._constraint is not None)
        if result is None or (self._forced and logprobs is not None and result.token != self._forced[0]):
            return None
        token = self._forced.popleft() if self._forced else self._accept(result)
        if logprobs is not None:
            logprobs.tokens.append(result)
        return token

    def score(self, rows: Rows, row: int, logprobs: Logprobs) -> None:
        """Add the log-probability of the prompt's token that follows the row to `logprobs`."""
        if (result := self._checked(rows.result(row), constrained=False)) is not None:
            logprobs.prompt.append(result)

    def _checked(self, result: RowResult, *, constrained: bool) -> RowResult | None:
        """The result if there is one; None if the row was not kept. Raises as `choose` does."""
        if result.status is Status.OK:
            return result
        if result.status is Status.MISSING:
            return None
        if result.status is Status.NONE_LEFT:
            p = self.params
            rules = p.ignore_eos or p.logit_bias or p.bad_words or p.min_tokens
            if rules or p.allowed_token_ids is not None or not constrained:
                raise NoTokenLeft(f"within the format, {NONE_LEFT}" if constrained else NONE_LEFT)
            raise FloatingPointError("no token that may come next has a probability")
        why = "all are 0" if result.status is Status.ZERO else "some are not finite"
        raise FloatingPointError(NO_LOGITS.format(why))

    def _accept(self, result: RowResult) -> int:
        token, constraint = result.token, self._constraint
        if self._follows_choices:
            self.noise.observe(result.surprise)
        if constraint is not None and not constraint.accept(token):
            raise RuntimeError(f"token {token} is in the mask of what may come next, but is refused")
        self._follow(token)
        if constraint is not None:
            self._force(constraint.forced())
        return token

    def forced(self, new: Sequence[int], *, one_by_one: bool = False) -> list[int]:
        """Add the answer's `new` tokens, and return the forced tokens that follow, if there are any. They are
        accepted already.

        With log-probabilities, or with `one_by_one`, they come from the next rows instead. Raises what the
        constraint raises.
        """
        if not self._forced and self._thinking is None:
            return []
        one_by_one = one_by_one or self.params.logprobs is not None
        forced = [] if one_by_one else self._take_forced()
        if self._thinking is not None and self._thinking.follow([*new, *forced] if forced else new):
            self._end_thoughts(self._thinking)
            forced += [] if one_by_one else self._take_forced()
        return forced

    @property
    def may_force(self) -> bool:
        """Whether tokens may be forced right after the next one."""
        closes = self._thinking is not None and self._thinking.horizon == 1
        return self._constraint is not None or bool(self._forced) or closes

    @property
    def horizon(self) -> int | None:
        """Number of next tokens before the first place at which the think block's limits may force tokens
        that a draft does not know, or at which a choice depends on the one before; None: any number."""
        if self._follows_choices:
            return 1
        return None if self._thinking is None else self._thinking.horizon

    @property
    def takes_any(self) -> bool:
        """Whether `validate` takes every draft."""
        return self._constraint is None and not self._forced

    def validate(self, draft: list[int]) -> list[int]:
        """The first tokens of a draft, as far as they may come next."""
        if self._forced:
            pairs = zip(draft, self._forced, strict=False)
            return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return draft if self._constraint is None else draft[: self._constraint.validate(draft)]

    def close(self) -> None:
        """Free llama.cpp's part, when the answer has ended. Idempotent."""
        self.noise.close()
        if self._dry is not None:
            self._dry.close()

    @property
    def _follows_choices(self) -> bool:
        """Whether a choice depends on those before it, so that no draft can be verified at once."""
        return bool(self.params.mirostat) and not self.params.is_greedy

    # --- forced tokens -------------------------------------------------------------------------------------

    def _force(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._forced.append(token)
            self._follow(token)

    def _follow(self, token: int) -> None:
        self.noise.accept(token)
        if self._dry is not None:
            self._dry.accept(token)

    def _take_forced(self) -> list[int]:
        forced = list(self._forced)
        self._forced.clear()
        return forced

    def _end_thoughts(self, watch: ThinkingWatch) -> None:
        bridge, constraint = list(watch.limits.bridge), self._constraint
        if constraint is not None:
            if constraint.validate(bridge) < len(bridge):
                return  # in the middle of a character: tried again after the next token
            for token in bridge:
                constraint.accept(token)
        watch.follow(bridge)
        self._force(bridge)
        if constraint is not None:
            self._force(constraint.forced())


def _row_sampler(params: SamplingParams, vocab: Vocab, prompt: Sequence[int]) -> RowSampler:
    """The request's filters, rules and penalties."""
    sampler = make_sampler(_filters(params), vocab.n_real)
    if params.ignore_eos:
        sampler.ban(vocab.eog_ids - params.stop_token_ids)
    sampler.bias(params.logit_bias)
    if params.allowed_token_ids is not None:
        sampler.allow(params.allowed_token_ids)
    for word in params.bad_words:
        sampler.bad_word(word)
    if params.min_tokens:
        sampler.ban(sorted(vocab.eog_ids | params.stop_token_ids), params.min_tokens)
    if "penalties" in params.on_rows:
        how = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        sampler.penalise(*how, params.repeat_last_n, prompt)
    return sampler


def _filters(params: SamplingParams) -> Filters:
    if params.is_greedy:
        return Filters(("best",))
    names = {"mirostat": "mirostat" if params.mirostat == 1 else "mirostat_v2"}
    if params.dynatemp_range:
        names["temperature"] = "temp_ext"
    ops = tuple(names.get(name, name) for name in params.chain)
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return Filters(ops, seed, **{one.name: getattr(params, one.name) for one in fields(Filters)[2:]})
