"""The state of slots, as llama-server reports it, and files with the states of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from .errors import GenerationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from .engine import Engine
    from .loading import Components
    from .prefix_cache.file import Entry
    from .sampling import SamplingParams


Result = TypeVar("Result")


def run(future: Future[Result], work: Callable[[], Result]) -> None:
    """Set `future` to what `work` returns or raises."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot and the request that runs in it, if any; without its text, which is private to the client."""

    id: int
    """llama.cpp's sequence id."""
    params: SamplingParams | None = None
    """The request's parameters; None if the slot is idle."""
    prompt_tokens: int = 0
    processed: int = 0
    """Prompt tokens that were computed."""
    cached: int = 0
    """Prompt tokens from the prefix cache."""
    decoded: int = 0
    remain: int = 0
    """Tokens that may still be generated."""


def slot_states(engine: Engine) -> list[SlotState]:
    """The current state of all slots, perhaps in the middle of a step. From any thread."""
    states = [SlotState(slot) for slot in range(engine.settings.parallel)]
    for sequence in tuple(engine.components.scheduler.running):
        if (slot := sequence.slot) is None:
            continue  # it has just lost its slot
        read, cached = min(sequence.computed, sequence.prompt_length), sequence.reused or 0
        states[slot] = SlotState(
            slot,
            sequence.sampler.params,
            sequence.prompt_length,
            max(0, read - cached),
            cached,
            sequence.generated,
            sequence.limit - len(sequence.tokens),
        )
    return states


@dataclass
class Counted:
    """Counts the entries of one salt."""

    salt: str
    longest: int = 0
    """Tokens of the longest prefix."""
    size: int = 0
    """Bytes of all of them."""

    def of(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Yield the entries of the salt, and count them."""
        for entry in entries:
            if entry.salt == self.salt:
                self.longest = max(self.longest, len(entry.tokens))
                self.size += entry.tokens.nbytes + entry.state.nbytes
                yield entry


def save_prefixes(components: Components, path: Path, salt: str) -> Counted:
    """Write the states for requests with this salt, as `--prefix-file` does. Engine's thread only. Raises
    OSError, and GenerationError if the model's file was overwritten."""
    if components.plan.spec.file.overwritten:
        raise GenerationError("the model's file was overwritten: states may be of either")
    counted = Counted(salt)
    limit = components.plan.settings.prefix_file_mib * 1024**2
    components.prefix_file(path).write(counted.of(components.cache.entries()), limit)
    return counted


def restore_prefixes(components: Components, path: Path, salt: str) -> Counted:
    """Load a file's states for requests with this salt, as far as they fit. Engine's thread only. Raises
    PrefixFileError."""
    counted = Counted(salt)
    components.cache.take_in(counted.of(components.prefix_file(path).read()))
    return counted
