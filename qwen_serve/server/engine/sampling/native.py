"""A request's samplers, rules and penalties as `RowSampler` applies them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen_serve.llamacpp.row_results import RowResult, Status
from qwen_serve.llamacpp.row_sampler import NO_LOGITS, Filters, RowRequest, RowSampler
from qwen_serve.server.engine.errors import NoTokenLeft

from .dry import Dry

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from qwen_serve.llamacpp import DrySampler
    from qwen_serve.llamacpp.row_sampler import Bits
    from qwen_serve.server.engine.vocab import Vocab

    from .parameters import SamplingParams
    from .thinking import ThinkingWatch

NONE_LEFT = (
    "allowed_token_ids, bad_words, logit_bias, min_tokens and ignore_eos leave no token to choose; allow more"
)


class NativeSampler:
    """Chooses the tokens of one answer. `accept` takes its tokens in order, forced ones too."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        vocab: Vocab,
        prompt: Sequence[int],
        banned: Collection[int],
        thinking: ThinkingWatch | None,
        dry: DrySampler | None,
    ) -> None:
        self._thinking, self._within = thinking, -1
        self._dry = None if dry is None else Dry(dry, params, vocab.n_real, prompt)
        self._rules = bool(
            banned
            or params.logit_bias
            or params.bad_words
            or params.min_tokens
            or params.allowed_token_ids is not None
        )
        self.follows_choices = bool(params.mirostat) and not params.is_greedy
        """Whether a choice depends on those before it, so that no draft can be verified at once."""
        self.sampler = sampler = RowSampler(_filters(params, seed), vocab.n_real)
        self._usual = [RowRequest(sampler)]
        """Requests for a step without a draft."""
        sampler.ban(banned)
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
        if thinking is not None and (penalty := thinking.limits.repetition_penalty) != 1.0:
            self._within = sampler.penalise(penalty, 0.0, 0.0, None, [])

    def requests(
        self, forced: Sequence[int], draft: Sequence[int], masks: Sequence[Bits], n_top: int
    ) -> list[RowRequest]:
        """Requests for the rows before each token of a draft, and for the one after it; the draft's first
        tokens are `forced`, which were accepted already. `masks`: what may come next and, as far as the draft
        is valid, after each of its other tokens; empty without a constraint."""
        plain = not masks and self._within < 0 and self._dry is None
        if plain and not forced and not draft:  # nearly all
            if self._usual[0].n_top != n_top:
                self._usual = [RowRequest(self.sampler, n_top=n_top)]
            return self._usual
        made = [RowRequest(self.sampler, n_top=n_top, scored=token) for token in forced[: len(draft) + 1]]
        if len(made) > len(draft):
            return made
        if self._within >= 0 and self._thinking is not None:
            self.sampler.set_active(self._within, self._thinking.open)
        rest = draft[len(made) :]
        for i in range(len(rest) + 1):
            mask, token = masks[i] if i < len(masks) else None, rest[i] if i < len(rest) else -1
            lowered = None if self._dry is None else self._dry.lowered(rest[:i])
            made.append(RowRequest(self.sampler, mask=mask, n_top=n_top, draft=token, lowered=lowered))
        return made

    def request_score(self, token: int, n_top: int) -> RowRequest:
        """A request for a token's log-probability."""
        return RowRequest(self.sampler, n_top=n_top, scored=token)

    def check(self, result: RowResult, *, constrained: bool) -> RowResult | None:
        """The result if there is one; None if the row was not kept. Raises as `Sampler.choose` does."""
        if result.status is Status.OK:
            return result
        if result.status is Status.MISSING:
            return None
        if result.status is Status.NONE_LEFT:
            if self._rules or not constrained:
                raise NoTokenLeft(f"within the format, {NONE_LEFT}" if constrained else NONE_LEFT)
            raise FloatingPointError("no token that may come next has a probability")
        why = "all are 0" if result.status is Status.ZERO else "some are not finite"
        raise FloatingPointError(NO_LOGITS.format(why))

    def observe(self, result: RowResult) -> None:
        """Take a choice, before `accept`."""
        if self.follows_choices:
            self.sampler.observe(result.surprise)

    def accept(self, token: int) -> None:
        """Take the next token of the answer."""
        self.sampler.accept(token)
        if self._dry is not None:
            self._dry.accept(token)

    def close(self) -> None:
        """Free its memory. Idempotent."""
        self.sampler.close()
        if self._dry is not None:
            self._dry.close()


def _filters(params: SamplingParams, seed: int) -> Filters:
    if params.is_greedy:
        return Filters(("best",))
    names = {"mirostat": "mirostat" if params.mirostat == 1 else "mirostat_v2"}
    if params.dynatemp_range:
        names["temperature"] = "temp_ext"
    return Filters(
        tuple(names.get(name, name) for name in params.chain),
        seed,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.typical_p,
        params.top_n_sigma,
        params.xtc_probability,
        params.xtc_threshold,
        params.min_keep,
        params.dynatemp_range,
        params.dynatemp_exponent,
        params.mirostat_tau,
        params.mirostat_eta,
    )
