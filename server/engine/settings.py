"""What can be set about the engine, with defaults that suit one GPU or a workstation without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from pathlib import Path

FlashAttention = Literal["auto", "on", "off"]
Sampling = Literal["auto", "device", "host"]
Speculation = Literal["auto", "off", "ngram", "mtp", "both"]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]

MAX_SEQUENCES = 256
"""llama.cpp refuses more sequence ids in one context (`LLAMA_MAX_SEQ`)."""


@dataclass(frozen=True)
class EngineSettings:
    """Everything the engine needs to know before it loads a model. Zero means "choose for me" where noted.

    Raises ValueError, naming the field and what would be right, when a value makes no sense.
    """

    model: Path
    n_gpu_layers: int = -1
    """Layers on the GPU, counted from the last; the output head is one more. -1: all of them."""
    main_gpu: int = 0
    """Which GPU, as llama.cpp numbers them."""
    use_mmap: bool = True
    """Map the file instead of reading it; weights that stay on the host then share the page cache."""
    mlock: bool = False
    """Keep the weights that stay on the host from being paged out."""

    ctx_size: int = 0
    """Tokens that the KV cache holds, all sequences together. 0: 16,384 a sequence but no more than 262,144,
    and what the prefix cache may hold; or what fits."""
    parallel: int = 8
    """Sequences that run at once; the others wait. Each one costs a recurrent state."""
    max_queue: int = 256
    """Requests that may wait beyond the ones that run; one more gets `QueueFull`."""

    flash_attn: FlashAttention = "auto"
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"

    batch_size: int = 0
    """Most tokens in one step. 0: four passes (`ubatch_size`) on a GPU, 2,048 without one."""
    ubatch_size: int = 0
    """Most tokens in one pass over the weights; sets the size of the compute buffers. 0: 2,048 on a GPU if
    that fits, else 512."""
    prefill_budget: int = 0
    """Most prompt tokens in a step that also has sequences decoding: bounds how long they are held up.
    0: on a GPU, as many as it reads in 0.75 s, by measurement at start, in whole passes, at least one and at
    most `batch_size`; that bounds steps without them, too, as whoever comes waits for the step. 128
    without a GPU."""
    mixed_steps: bool = False
    """Put prompt tokens and decodes into one call; otherwise calls of the two kinds take turns, which is
    as fast, and lets tokens leave before a prompt is read on."""

    sampling: Sampling = "auto"
    """Where the best tokens are found: in the graph, so that a row's token comes to the host and not its
    logits, or on the host. "auto" measures both at start; without a GPU it is the host."""

    prefix_cache: bool = True
    """Keep states of what was computed, for requests that begin alike."""
    prefix_checkpoints: int = 0
    """States that the prefix cache may hold at once; each costs a sequence id and a recurrent state.
    0: 32, or what fits."""
    prefix_cells: int = 0
    """KV cells that it may hold beyond those of running sequences. All cells up to the highest occupied one
    are read in every step, so that holding more makes every step slower. 0: a tenth of the bytes of the
    weights, which each step reads too; at least 9,216, a long prompt and its answer."""
    prefix_shrinks: bool = True
    """Hold fewer beside more than 8 running sequences, in proportion, and where prompts do not come again."""
    prefix_interval: int = 4096
    """Tokens between the states kept while a long prompt is read. 0: none on the way."""
    prefix_host_mib: int = 0
    """MiB of host memory for states that had to leave the device. 0: they are gone."""

    speculation: Speculation = "auto"
    """What guesses tokens ahead, to be verified many at a time: the text itself where it repeats ("ngram"),
    the checkpoint's own MTP head, either by what pays ("both"), or nothing. Answers do not depend on it.
    "auto": both on a GPU; the text alone without one, where to verify a token takes nearly as long as to
    decode it."""
    draft_max: int = 255
    """Most tokens that are guessed at once from the text."""
    mtp_depth: int = 16
    """Most tokens that are guessed at once by the MTP head."""
    mtp_snapshots: int = -1
    """Tokens by which a sequence that decodes alone can go back to a snapshot of its state, rather than to a
    copy that it read on from. Multiplies the memory of every recurrent state by one more than it is.
    -1: where the head drafts for at most 8 sequences, 2 or as many as fit; else none."""
    mtp_window: int = 512
    """Most tokens that the MTP head reads before it guesses for a sequence for the first time."""
    draft_pool: int = 0
    """Tokens of finished requests to guess from, too. 0: requests see nothing of each other. Otherwise how
    fast an answer comes may tell that another was alike, and repeated benchmarks profit from old answers."""
    draft_always: bool = False
    """Guess as far as possible whenever possible, rather than by what pays."""
    tokenizer_cache: int = 2**20
    """Tokens of long texts whose ids are remembered, for when they come again; a million take some 10 MiB."""

    threads: int = 0
    """CPU threads for steps of one token. 0: one less than the physical cores this process may use."""
    threads_batch: int = 0
    """CPU threads for larger steps. 0: as `threads`."""

    def __post_init__(self) -> None:
        at_least = {
            "n_gpu_layers": -1,
            "main_gpu": 0,
            "ctx_size": 0,
            "parallel": 1,
            "max_queue": 0,
            "batch_size": 0,
            "ubatch_size": 0,
            "prefill_budget": 0,
            "prefix_checkpoints": 0,
            "prefix_cells": 0,
            "prefix_interval": 0,
            "prefix_host_mib": 0,
            "draft_max": 1,
            "mtp_depth": 1,
            "mtp_snapshots": -1,
            "mtp_window": 1,
            "draft_pool": 0,
            "tokenizer_cache": 0,
            "threads": 0,
            "threads_batch": 0,
        }
        for name, low in at_least.items():
            if (value := getattr(self, name)) < low:
                raise ValueError(f"{name} is {value}; it must be at least {low}")
        if self.parallel > MAX_SEQUENCES:
            raise ValueError(
                f"parallel is {self.parallel}; llama.cpp holds at most {MAX_SEQUENCES} sequences"
            )
        if 0 < self.batch_size < self.parallel:
            raise ValueError(
                f"batch_size is {self.batch_size}; it must be at least parallel ({self.parallel}), "
                "one token for each running sequence"
            )
        if self.flash_attn not in get_args(FlashAttention):
            raise ValueError(
                f"flash_attn is {self.flash_attn!r}; allowed: {', '.join(get_args(FlashAttention))}"
            )
        if self.sampling not in get_args(Sampling):
            raise ValueError(f"sampling is {self.sampling!r}; allowed: {', '.join(get_args(Sampling))}")
        if self.speculation not in get_args(Speculation):
            raise ValueError(
                f"speculation is {self.speculation!r}; allowed: {', '.join(get_args(Speculation))}"
            )
        for name in ("cache_type_k", "cache_type_v"):
            if (value := getattr(self, name)) not in get_args(CacheType):
                raise ValueError(f"{name} is {value!r}; allowed: {', '.join(get_args(CacheType))}")
        if self.cache_type_v.startswith(("q", "iq")) and self.flash_attn == "off":
            raise ValueError(
                f"cache_type_v is {self.cache_type_v!r}, which needs flash attention; "
                "set flash_attn to 'auto' or 'on', or cache_type_v to 'f16'"
            )
