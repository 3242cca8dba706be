"""The state of slots, as llama-server reports it, and files with the states of prompts."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .engine import Engine
from .errors import GenerationError
from .prefix_cache.file import Counted, PrefixFileError
from .sampling import SamplingParams


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


def save_prefixes(engine: Engine, path: Path, salt: str) -> Counted:
    """Write the states for requests with this salt, as `--prefix-file` does.

    Not on the engine's thread: that one copies a state at a time, between two steps. Raises OSError,
    EngineDead, and GenerationError if the model's file was overwritten.
    """
    components = engine.components
    if components.plan.spec.file.overwritten:
        raise GenerationError("the model's file was overwritten: states may be of either")
    copies = components.cache.entries(salt)
    entries = iter(lambda: engine.between_steps(partial(next, copies, None)).result(), None)
    limit = components.plan.settings.prefix_file_mib * 1024**2
    return components.prefix_file(path).write((entry for entry in entries if entry is not None), limit)


def restore_prefixes(engine: Engine, path: Path, salt: str) -> Counted:
    """Load a file's states for requests with this salt, as far as they fit. Count those that are cached now,
    and the bytes of all.

    Not on the engine's thread: that one takes a state at a time, between two steps. Raises EngineDead, and
    PrefixFileError if no state can be used; if some can, the result says why others are not.
    """
    cache, counted = engine.components.cache, Counted()
    taken = []
    try:
        for entry in engine.components.prefix_file(path).read():
            if entry.salt != salt:
                continue
            node = engine.between_steps(partial(cache.take_in, entry)).result()
            counted.size += entry.nbytes
            if node is not None:
                counted.entries, counted.longest = (
                    counted.entries + 1,
                    max(counted.longest, len(entry.tokens)),
                )
                taken.append(node)
    except PrefixFileError as error:
        if not taken:
            raise
        counted.damage = str(error)
    engine.between_steps(partial(cache.refresh, taken)).result()
    return counted
