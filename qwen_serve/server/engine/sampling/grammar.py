"""Grammars in llguidance's Lark dialect: each is compiled once, and each answer has a matcher of its own.

llguidance (https://github.com/guidance-ai/llguidance) finds the tokens that may come next, with an Earley
parser over a lexer of derivatives of regular expressions.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from itertools import accumulate, pairwise
from threading import RLock
from time import thread_time
from typing import Any

import numpy as np
from cachetools import LRUCache
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from qwen_serve.llamacpp.row_sampler import N_THREADS, Bits
from qwen_serve.server.engine.errors import EngineDead, FormatTooComplex, InvalidGrammar, QueueFull

from .constraint import Constraint, Mask
from .digits import DigitTokens
from .grammar_validator import LEXER_STATES, STACK, GrammarValidator

log = logging.getLogger(__name__)

LONGEST_GRAMMAR = 512 * 1024
"""Maximum characters of a grammar."""

SLOWEST_MASK = 0.25
"""Maximum CPU seconds of a grammar's first mask, since all answers of a step wait for each mask."""

MAX_MESSAGE = 600
"""Maximum characters of an error message, since llguidance's messages include the grammar."""

JSON = "%json"
"""Grammars that include a JSON schema contain this."""

CACHED = 64
"""Maximum number of cached grammars, and of cached refusals."""

WAITING = 32
"""Maximum grammars that wait to be compiled. A hostile one takes as long as the validator allows."""

LIMITS = LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)
"""llguidance's defaults, which bound the time of a compilation and of a step, except for the lexer states."""


class Grammar:
    """A compiled grammar, which any number of answers may follow. From any thread."""

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, end: int, digits: DigitTokens | None = None
    ) -> None:
        """With `digits`, numbers are bounded."""
        self._matcher, self._tokenizer, self._end, self._digits = matcher, tokenizer, end, digits

    def begin(self, param: str = "the format") -> GrammarConstraint:
        """A constraint for one answer; error messages name the field `param`."""
        return GrammarConstraint(self._matcher.deep_copy(), self._tokenizer, self._end, param, self._digits)


class GrammarConstraint:
    """Constrains an answer to a grammar, and forces `end` when nothing else can follow."""

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, end: int, param: str, digits: DigitTokens | None
    ) -> None:
        self.matcher, self._tokenizer, self._end = matcher, tokenizer, end
        self.n_words = (tokenizer.vocab_size + 31) // 32
        """Words of a mask."""
        self._param, self._digits = param, digits
        self._run = 0
        """Digits at the end of the text."""
        self._ended = False

    def forced(self) -> list[int]:
        """The text that the grammar forces, tokenized as the tokenizer would."""
        if self._ended:
            return []
        matcher = self.matcher
        forced = [] if matcher.is_stopped() else matcher.compute_ff_tokens()
        if forced and not matcher.consume_tokens(forced):
            for token in filter(self._tokenizer.is_special_token, forced):
                name = self._tokenizer.decode_str([token])
                wrong = f"its text has {name}, one token of this model; a structural_tag can ask for it"
                raise FormatTooComplex(self._param, wrong)
            self._fail()
        self._follow(forced)
        if matcher.is_stopped():
            if matcher.is_error():
                self._fail()
            self._ended = True
            forced.append(self._end)
        return forced

    def accept(self, token: int) -> bool:
        """As `Constraint.accept`. Raises FormatTooComplex if the grammar exceeds the limits."""
        digits = self._digits
        if digits and digits.too_many(self._run, token) and digits.in_number(self.matcher):
            return False
        accepted = self.matcher.try_consume_tokens([token]) == 1
        if accepted:
            self._follow([token])
            self._ended = self.matcher.is_stopped() and self.matcher.stop_reason() == "EndOfSentence"
        elif self.matcher.is_error():
            self._fail()
        return accepted

    def mask(self) -> Mask:
        """The tokens that may come next; also tokens that end a generation if the text is complete."""
        return np.unpackbits(self.masks(())[0].view(np.uint8), bitorder="little").view(np.bool_)

    def validate(self, tokens: Sequence[int]) -> int:
        """How many tokens fit; fewer if a run of digits is too long."""
        valid = self.matcher.validate_tokens(list(tokens))
        return self._digits.bearable(self._run, tokens[:valid]) if self._digits else valid

    def masks(self, draft: Sequence[int]) -> list[Bits]:
        """As of `Constraint`. Raises FormatTooComplex if the grammar exceeds the limits."""
        [masks] = MaskWriter().write([(self, draft)])
        if isinstance(masks, Exception):
            raise masks
        return masks

    def completed(self, masks: list[Bits], draft: Sequence[int]) -> list[Bits]:
        """`masks` that `matcher` gave, with bounded numbers. Raises FormatTooComplex."""
        matcher, digits, run = self.matcher, self._digits, self._run
        if matcher.is_error():
            self._fail()
        if digits is None or not digits.may_exceed(run, draft):
            return masks
        limited = [digits.restrict(masks[0], run, matcher)]
        for token, mask in zip(draft, masks[1:], strict=True):
            if matcher.is_stopped() or matcher.try_consume_tokens([token]) != 1:
                break
            run = digits.after(run, [token])
            limited.append(digits.restrict(mask, run, matcher))
        if len(limited) > 1 and not matcher.rollback(len(limited) - 1):
            self._fail()
        return limited

    def _follow(self, tokens: list[int]) -> None:
        if self._digits:
            self._run = self._digits.after(self._run, tokens)

    def _fail(self) -> None:
        why = self.matcher.get_error()[:MAX_MESSAGE]
        raise FormatTooComplex(self._param, f"it is too complex to be followed any further: {why}")


class MaskWriter:
    """Writes the masks of a step's rows. llguidance's threads compute those of all grammars at once, without
    the GIL."""

    def __init__(self) -> None:
        self._bits = np.zeros((0, 0), np.uint32)

    def write(self, asked: Sequence[tuple[Constraint, Sequence[int]]]) -> list[list[Bits] | Exception]:
        """For each constraint its `masks` for a draft, or what they raise; valid until the next call."""
        grammars = [(one, draft) for one, draft in asked if isinstance(one, GrammarConstraint)]
        computed = iter(self._computed(grammars))
        found: list[list[Bits] | Exception] = []
        for constraint, draft in asked:
            try:
                if isinstance(constraint, GrammarConstraint):
                    found.append(constraint.completed(next(computed), draft))
                else:
                    found.append(constraint.masks(draft))
            except Exception as error:  # an error of one answer must not affect the others
                found.append(error)
        return found

    def _computed(self, grammars: list[tuple[GrammarConstraint, Sequence[int]]]) -> list[list[Bits]]:
        if not grammars:
            return []
        starts = list(accumulate((1 + len(draft) for _, draft in grammars), initial=0))
        n, words = starts[-1], grammars[0][0].n_words
        if len(self._bits) < n:
            self._bits = np.zeros((n, words), np.uint32)
        of = list(zip(grammars, starts, strict=False))
        to = self._bits.ctypes.data, 4 * words, n
        if alone := [(one.matcher, start) for (one, draft), start in of if not draft]:
            _threads().unsafe_compute_mask_ptr(alone, *to)
        if drafts := [(one.matcher, start, list(draft)) for (one, draft), start in of if draft]:
            _threads().unsafe_compute_mask_ptr_with_draft_token(drafts, *to)
        rows = list(self._bits[:n])
        return [rows[start:end] for start, end in pairwise(starts)]


@cache
def _threads() -> LLExecutor:
    return LLExecutor(N_THREADS)


class _Job:
    """A grammar to compile, and the callers that wait for it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.waiting: set[Future[Grammar]] = set()


class GrammarCompiler:
    """Compiles grammars on a thread of its own, one after the other, so that none delays other work.

    `make_tokenizer` is called there once, before the first grammar. If no caller waits for a grammar any
    more, it is not compiled, and its compilation is interrupted if it has begun.
    """

    def __init__(self, make_tokenizer: Callable[[], Any], end: int, special: Sequence[str] = ()) -> None:
        """Complete answers end with the token `end`; grammars may name `special` tokens."""
        self._end = end
        self._grammars: LRUCache[str, Grammar] = LRUCache(CACHED)
        self._refusals: LRUCache[str, str] = LRUCache(CACHED)
        """Reasons, by grammar."""
        self._lock = RLock()
        """Reentrant, since cancelling a future calls back on the same thread."""
        self._jobs: dict[str, _Job] = {}
        self._running: _Job | None = None
        self._stopped = False
        self._validator = GrammarValidator(special)
        self._thread = ThreadPoolExecutor(1, "grammar")
        usual = threading.stack_size(4 * STACK)
        self._tokenizer: Future[LLTokenizer] = self._thread.submit(make_tokenizer)  # starts the thread
        self._digits: DigitTokens | None = None
        threading.stack_size(usual)

    def compile(self, text: str) -> Future[Grammar]:
        """Compile a grammar in llguidance's Lark dialect, or take it from the cache.

        The future raises InvalidGrammar for an invalid or too large grammar. A caller that stops waiting
        cancels it. Raises QueueFull and EngineDead.
        """
        future: Future[Grammar] = Future()
        with self._lock:
            if (known := self._grammars.get(text)) is not None:
                future.set_result(known)
                return future
            if (refusal := self._refusals.get(text)) is not None:
                future.set_exception(InvalidGrammar(refusal))
                return future
            if self._stopped:
                raise EngineDead("the engine was closed")
            job = self._jobs.get(text)
            if job is None:
                if len(self._jobs) >= WAITING:
                    raise QueueFull(f"{WAITING} grammars wait to be compiled; try again later")
                job = self._jobs[text] = _Job(text)
                self._thread.submit(self._run, job)
            job.waiting.add(future)
        future.add_done_callback(partial(self._leave, job))
        return future

    def _leave(self, job: _Job, future: Future[Grammar]) -> None:
        with self._lock:
            job.waiting.discard(future)
            if job.waiting or self._jobs.get(job.text) is not job:
                return
            del self._jobs[job.text]
            if self._running is job:
                self._validator.interrupt()

    def _run(self, job: _Job) -> None:
        with self._lock:
            if not job.waiting:
                return
            self._running = job
        grammar, refusal = None, None
        try:
            grammar = self._compile(job)
        except InvalidGrammar as error:
            refusal = str(error)
        except Exception as error:  # the tokenizer's error says nothing about the grammar
            log.exception("a grammar could not be compiled")
            failure: Exception = error
        with self._lock:
            self._running = None
            wanted = self._jobs.get(job.text) is job
            if wanted:
                del self._jobs[job.text]
            waiting, job.waiting = job.waiting, set()
            if grammar is not None:
                self._grammars[job.text] = grammar
            elif refusal is not None and wanted:  # else it was interrupted
                self._refusals[job.text] = refusal
        for future in waiting:
            if not future.set_running_or_notify_cancel():
                continue
            if grammar is not None:
                future.set_result(grammar)
            else:
                future.set_exception(InvalidGrammar(refusal) if refusal is not None else failure)

    def _compile(self, job: _Job) -> Grammar:
        text = job.text
        if len(text) > LONGEST_GRAMMAR:
            raise InvalidGrammar(f"it has {len(text)} characters as a grammar; {LONGEST_GRAMMAR} are allowed")
        tokenizer = self._tokenizer.result()
        if not self._validator.compiles(text, lambda: bool(job.waiting)):
            raise InvalidGrammar("it is too complex: too many patterns, or references that lead on and on")
        try:
            matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
            began = thread_time()
            mask = b"" if matcher.is_error() else matcher.compute_bitmask()
            took = thread_time() - began
        except BaseException as error:  # a Rust panic is not an Exception
            raise InvalidGrammar(f"llguidance failed: {error}"[:MAX_MESSAGE]) from error
        if matcher.is_error():
            raise InvalidGrammar(matcher.get_error()[:MAX_MESSAGE])
        if took > SLOWEST_MASK:
            raise InvalidGrammar("what may come first takes too long to tell")
        if not any(mask):
            raise InvalidGrammar("no text fits it")
        if self._digits is None:
            self._digits = DigitTokens(tokenizer)
        return Grammar(matcher, tokenizer, self._end, self._digits if JSON in text else None)

    def stop(self) -> None:
        """Fail waiting and later callers with EngineDead. From any thread. Idempotent."""
        with self._lock:
            self._stopped = True
            waiting = [future for job in self._jobs.values() for future in job.waiting]
            for future in waiting:
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineDead("the engine was closed"))

    def close(self) -> None:
        """Stop, and wait until the model is no longer used. Idempotent."""
        self.stop()
        self._thread.shutdown(cancel_futures=True)
        self._validator.close()
