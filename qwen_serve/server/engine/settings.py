"""The engine's settings, with defaults for one GPU or a workstation without one.

Each setting has a default, bounds and a description. The command line, its help, environment variables, the
settings file and error messages are generated from these (`qwen_serve/server/settings.py`).
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from .planning.hardware import physical_cores
from .scheduling_policy import SchedulingPolicy

FlashAttention = Literal["auto", "on", "off"]
Sampling = Literal["auto", "device", "host"]
SplitMode = Literal["none", "layer"]
F16Copies = Literal["auto", "on", "off"]
Repack = Literal["auto", "on", "off"]
Speculation = Literal["auto", "off", "ngram", "mtp", "draft", "both"]
StateType = Literal["f32", "f16"]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]

MAX_SEQUENCES = 256
"""llama.cpp's maximum of sequence ids in a context (`LLAMA_MAX_SEQ`)."""

LONGEST_NAME = 256
"""Maximum characters of an adapter's name."""

THREADS_PER_CORE = 4
"""Maximum threads for each core. More are refused, since ggml's threads busy-wait for each other."""


class Section(BaseModel):
    """A group of settings. The class's title is the group's heading in `--help`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelSettings(Section, title="model"):
    """The model, its files and its devices."""

    model: Path
    """GGUF file of the model, or a folder with exactly one"""
    n_gpu_layers: int = Field(-1, ge=-1)
    """number of layers on the GPU, counted from the last one; the output head counts as one more. -1: all.
    Lower it for a model that is larger than the GPU's memory"""
    main_gpu: int = Field(0, ge=0)
    """index of the GPU to use, as llama.cpp numbers them"""
    split_mode: SplitMode = "none"
    """how layers are placed on several GPUs. none: all on one GPU. layer: distributed over all visible GPUs,
    for models that are too large for one; a step uses one GPU after the other"""
    tensor_split: str | None = None
    """each GPU's share of the layers with split_mode layer, such as 3,1 (default: by free memory)"""
    offload_embedding: bool = True
    """put the token embedding on the GPU, too, if it is an NVIDIA GPU with all layers and enough memory. off:
    keep it on the host, as llama.cpp does; the GPU then waits for the lookup of each prompt's tokens"""
    f16_copies: F16Copies = "auto"
    """keep FP16 copies of the quantized matrices on the GPU, for prompts and steps of many sequences. They
    take 2 bytes a weight, 8.4 GB for a 4B. auto: on GPUs that are faster with them (NVIDIA's Hopper), if
    there is memory for all"""
    repack: Repack = "auto"
    """reorder quantized matrices in place for the tensor cores of NVIDIA GPUs from sm_80 on, which makes
    steps of few sequences faster. With FP16 copies, steps of many sequences read the copies, except with
    deterministic, where one kernel computes all steps. auto: on NVIDIA's Hopper"""
    use_mmap: bool = True
    """map the file into memory instead of reading it, so that weights on the host share the page cache"""
    mlock: bool = False
    """lock the weights on the host in memory, so that they are not swapped out"""
    lora: str | None = None
    """LoRA adapters, as NAME=FILE.gguf, separated by commas or in repeated flags. A request chooses one by
    its name in `model` or its number in `lora`"""

    @field_validator("lora")
    @classmethod
    def _are_adapters(cls, given: str | None) -> str | None:
        names = []
        for one in (given or "").split(",") if given else ():
            name, equals, path = (part.strip() for part in one.partition("="))
            if not (name and equals and path) or len(name) > LONGEST_NAME:
                raise ValueError(
                    f"Input should be NAME=FILE.gguf, such as sql=models/sql-F32.gguf: not {one!r}"
                )
            if name in names:
                raise ValueError(f"two adapters are called {name!r}")
            names.append(name)
        return given

    @property
    def adapters(self) -> dict[str, Path]:
        """The files of the LoRA adapters by name, in the order of their numbers."""
        pairs = (one.partition("=") for one in (self.lora or "").split(",") if one.strip())
        return {name.strip(): Path(path.strip()) for name, _, path in pairs}

    @field_validator("tensor_split")
    @classmethod
    def _are_shares(cls, given: str | None) -> str | None:
        if given is not None:
            try:
                numbers = [float(share) for share in given.split(",")]
            except ValueError:
                numbers = []
            if not (any(numbers) and all(0 <= share < float("inf") for share in numbers)):
                raise ValueError(f"Input should be numbers of at least 0, such as 3,1: not {given!r}")
        return given

    @model_validator(mode="after")
    def _shares_go_with_several_gpus(self) -> Self:
        if self.split_mode == "none" and self.tensor_split is not None:
            raise ValueError(f"tensor_split is {self.tensor_split!r}, which needs split_mode 'layer'")
        if self.split_mode == "layer" and self.main_gpu:
            raise ValueError(
                f"main_gpu is {self.main_gpu}, but split_mode 'layer' uses every GPU; leave main_gpu out, "
                "and choose GPUs with CUDA_VISIBLE_DEVICES"
            )
        return self

    @property
    def shares(self) -> list[float]:
        """Each GPU's share of the layers; empty if one GPU holds them all."""
        return [float(share) for share in (self.tensor_split or "").split(",") if share]


class CacheSettings(Section, title="KV cache"):
    """The keys and values of all sequences."""

    ctx_size: int = Field(0, ge=0)
    """size of the KV cache in tokens, for all sequences together. 0: 16,384 for each sequence, at most
    262,144, plus cells for the prefix cache, or what fits. Raise it for long contexts, lower it to save
    memory"""
    flash_attn: FlashAttention = "auto"
    """whether to use flash attention. auto: llama.cpp decides, but deterministic switches it off on the
    CPU"""
    cache_type_k: CacheType = "f16"
    """type of the cached keys. A smaller type saves memory and costs accuracy"""
    cache_type_v: CacheType = "f16"
    """type of the cached values. A quantized type needs flash attention"""
    state_type: StateType = "f32"
    """type of the states of recurrent layers, of sequences and of the prefix cache. f16 halves what they take
    in memory and what a step reads of them, and rounds a state after every token"""

    @field_validator("state_type", mode="before")
    @classmethod
    def _no_bf16_states(cls, kind: object) -> object:
        if kind == "bf16":
            raise ValueError("bf16 has 8 bits for a state that adds up all tokens, too few; set f16, or f32")
        return kind

    @model_validator(mode="after")
    def _packed_values_need_flash_attention(self) -> Self:
        if self.cache_type_v.startswith(("q", "iq")) and self.flash_attn == "off":
            raise ValueError(
                f"cache_type_v is {self.cache_type_v!r}, which needs flash attention; "
                "set flash_attn to 'auto' or 'on', or cache_type_v to 'f16'"
            )
        return self


class SchedulerSettings(Section, title="scheduler"):
    """Running and waiting requests, and the size of a step."""

    parallel: int = Field(8, ge=1, le=MAX_SEQUENCES)
    """maximum number of sequences that run at once; further requests wait. Each takes memory for a recurrent
    state"""
    max_queue: int = Field(256, ge=0)
    """maximum number of waiting requests. A further request gets 429, unless its API key (or its address,
    without a key) has fewer waiting requests than its equal share; at twice the limit every request does"""
    scheduling_policy: SchedulingPolicy = "fair"
    """order of waiting requests. fair: each API key (or address, without a key) gets its share, so no client
    waits for another's bulk job; with one key it is first come, first served. priority: by service_tier, then
    by the lowest `priority`. fcfs: first come, first served. With fair and priority an answer may be
    preempted; its state then waits in the prefix cache"""
    batch_size: int = Field(0, ge=0)
    """maximum tokens in one step, and maximum prompt tokens between two decode steps. 0: four passes of
    prompts on a GPU (8,192 with the default ubatch_size), 2,048 without one"""
    ubatch_size: int = Field(0, ge=0)
    """maximum tokens in one pass over the weights, which determines the size of the compute buffers. Prompts
    that need several passes are read in multiples of 512 tokens; the last pass may have up to this many. 0:
    2,304 on a GPU if that fits, else 512"""
    prefill_seconds: float = Field(0.15, gt=0, allow_inf_nan=False)
    """maximum time, in seconds, for which a prefill step may delay running answers, rounded to whole passes
    (ubatch_size); without a GPU at most 128 tokens. A larger value raises throughput if many requests arrive
    at once"""
    async_scheduling: bool = True
    """on a GPU, launch the next step before the last one's tokens are read. This works for prompts and for
    decodes without drafts. Needs the patches next-tokens and row-sampler"""
    deterministic: bool = False
    """give the same answer to the same request whatever other requests run, at a lower speed
    (docs/deterministic.md). Every sequence has its own KV cells (ctx_size / parallel, and as many for each
    state of the prefix cache), and prompts are read in small passes or cut at fixed places. Drafts need the
    patch batch-invariant; on the CPU they come from the text by default"""
    remember: bool = True
    """store a start's measurements (times of steps, sizes of buffers) in the cache folder, for later starts
    with the same GPU, driver, build, model and settings"""

    @model_validator(mode="after")
    def _a_token_for_each_sequence(self) -> Self:
        if 0 < self.batch_size < self.parallel:
            raise ValueError(
                f"batch_size is {self.batch_size}; it must be at least parallel ({self.parallel}), "
                "one token for each running sequence"
            )
        return self


class PrefixCacheSettings(Section, title="prefix cache"):
    """Cached states, for requests that begin with the same tokens."""

    prefix_cache: bool = True
    """reuse the states of earlier prompts and answers that a new prompt begins with"""
    prefix_checkpoints: int = Field(0, ge=0)
    """maximum number of states in the prefix cache; each takes memory for a recurrent state, and a sequence
    id. 0: 32, or what fits. On an NVIDIA GPU with all layers, an F16 cache and the patches
    attention-own-cells and kq-mask-bits: as many as the 256 ids allow and as fit, with their cells, into
    half of the remaining memory"""
    prefix_cells: int = Field(0, ge=0)
    """maximum number of KV cells in the prefix cache, beside those of running sequences, which evict cached
    ones if they need more. 0: 131,072 if steps read only their own cells (as above). Otherwise cached cells
    make steps longer, so it is a tenth of the weights' bytes (at least 9,216), and fewer while less than half
    of the prompt tokens come from the cache"""
    prefix_interval: int = Field(4096, ge=0)
    """number of tokens between states that are kept while a long prompt is read; 0: keep none"""
    prefix_min_tokens: int = Field(0, ge=0)
    """minimum number of tokens (16 or more) between a state at the start of a chat turn, or at the end of a
    new prompt, and the state before it, since each costs a pass of its own. 0: 64 on a GPU, where a pass of
    so few tokens takes as long as one token, else 16"""
    prefix_host_mib: int = Field(0, ge=0)
    """host memory for states that are evicted from the device, in MiB; 0: drop them"""
    prefix_file: Path | None = None
    """file that keeps the states over a restart. It is written when the server stops, and read when it starts
    with the same model, build and settings (default: none)"""
    prefix_file_mib: int = Field(1024, ge=1)
    """maximum size of prefix_file, in MiB; the most recently used states are written first"""

    @model_validator(mode="after")
    def _there_is_something_to_write_and_where(self) -> Self:
        if self.prefix_file is None:
            return self
        if not self.prefix_cache:
            raise ValueError("prefix_file needs the prefix cache; leave it out, or set prefix_cache to true")
        other = self.prefix_file.exists() and not self.prefix_file.is_file()
        if other or not self.prefix_file.absolute().parent.is_dir():
            raise ValueError(
                f"prefix_file is {self.prefix_file}; it must be a regular file, or a new one, in a folder "
                "that exists"
            )
        return self


class SpeculationSettings(Section, title="speculation"):
    """Drafts of tokens, which the model then verifies several at a time. Speculation does not change
    answers."""

    speculation: Speculation = "auto"
    """source of drafts. ngram: repeated text. mtp: the checkpoint's MTP head. both: whichever of the two is
    faster at the moment. draft: only draft_model; with the other values it drafts beside them. off: none.
    auto: both on a GPU, ngram without one"""
    draft_model: Path | None = None
    """GGUF file of a block drafter (DFlash) that was trained for this model (default: none)"""
    draft_window: int = Field(512, ge=1)
    """number of a sequence's newest tokens that the MTP head or the draft model reads before its first draft;
    their hidden states take memory. While drafting, a draft model attends to at most twice as many"""
    draft_max: int = Field(255, ge=1)
    """maximum tokens of a draft from the text"""
    draft_history: int = Field(16_384, ge=0)
    """number of tokens of a tenant's last answers that its other requests draft from, too. Only requests of
    the same tenant, API key and cache_salt share answers. 0: none"""
    mtp_depth: int = Field(16, ge=1)
    """maximum tokens of a draft from the MTP head"""
    draft_parallel: int = Field(0, ge=0)
    """maximum sequences at once for which the MTP head or a draft model drafts. Up to 16 sequences, or this
    number if it is larger, draft from the text. Each has one more recurrent state, to go back to. 0: one;
    with draft_always all"""
    snapshots: int = Field(-1, ge=-1)
    """number of earlier recurrent states that are kept of a sequence that runs alone. That many rejected
    tokens are rolled back without a copy. -1: 8 with the MTP head, the length of a block with a draft model,
    or what fits; else 0. The maximum with deterministic is 15. With stock llama.cpp they take memory for
    every sequence and every state of the prefix cache, and -1 means 2 with at most 8 sequences"""
    operands: int = Field(0, ge=0, le=62)
    """longest draft of each sequence whose rejected tokens are rolled back without a second state: what the
    recurrent layers read of its tokens is kept instead. Longer ones from the text take a copy. Replaces
    snapshots. 0: none"""


class CpuSettings(Section, title="CPU"):
    """Threads of the computations on the CPU."""

    threads: int = Field(0, ge=0)
    """number of CPU threads for steps of one token; 0: one less than the physical cores that this process may
    use"""
    threads_batch: int = Field(0, ge=0)
    """number of CPU threads for larger steps; 0: as many as `threads`"""

    @field_validator("threads", "threads_batch")
    @classmethod
    def _no_crowd(cls, threads: int) -> int:
        most = THREADS_PER_CORE * physical_cores()
        if threads > most:
            raise ValueError(f"Input should be at most {most}, {THREADS_PER_CORE} for each physical core")
        return threads


class ForcedSettings(Section, title="forced"):
    """Settings for tests and measurements. Users cannot set them; by default the engine decides."""

    draft_always: bool = False
    """always draft as many tokens as possible, even if that is slower"""
    prefill_budget: int = Field(0, ge=0)
    """maximum prompt tokens in a step beside running answers. 0: as many as are read in prefill_seconds, at
    the fastest rate measured so far"""
    prefix_shrinks: bool = True
    """keep proportionally fewer cells while less than half of the prompt tokens come from the cache"""
    sampling: Sampling = "auto"
    """where tokens are chosen. device: where the logits were computed, so that tokens are copied to the host,
    not logits. host: on the host's threads. auto: on the device if that is a GPU. The answers are the same"""


class PictureSettings(Section, title="pictures"):
    """Pictures in messages."""

    mmproj: Path | None = None
    """GGUF file of the model's vision tower (default: mmproj-NAME-*.gguf beside the model); off: none.
    Without a vision tower, requests with pictures are refused"""
    mmproj_offload: bool = True
    """put the vision tower on the GPU, if one is used"""
    image_min_tokens: int = Field(0, ge=0)
    """minimum tokens of a picture; smaller pictures are enlarged. 0: 8"""
    image_max_tokens: int = Field(0, ge=0, le=16384)
    """maximum tokens of a picture; larger pictures are shrunk. 0: 4096. Lower it for faster answers with less
    detail"""
    image_cache_mib: int = Field(256, ge=0)
    """host memory for cached encoded pictures, in MiB; a chat sends its pictures again with every turn"""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.image_max_tokens and self.image_min_tokens > self.image_max_tokens:
            raise ValueError(
                f"image_min_tokens is {self.image_min_tokens}, image_max_tokens {self.image_max_tokens}: it "
                "must be at most that"
            )
        return self


class UserSettings(
    ModelSettings,
    PictureSettings,
    CacheSettings,
    SchedulerSettings,
    PrefixCacheSettings,
    SpeculationSettings,
    CpuSettings,
):
    """The engine's settings that users can set. The descriptions say what 0 and -1 stand for.

    Raises ValueError (pydantic's ValidationError), naming the field and what would be right.
    """

    @model_validator(mode="after")
    def _a_draft_model_drafts(self) -> Self:
        if self.speculation == "draft" and self.draft_model is None:
            raise ValueError(
                "speculation is 'draft', which needs draft_model; set that, or another speculation"
            )
        if self.draft_model is not None and self.speculation == "off":
            raise ValueError("draft_model is of no use with speculation 'off'; leave one of the two out")
        return self

    def replace(self, **changes: Any) -> Self:
        """A copy with other values, validated again."""
        return type(self)(**{**dict(self), **changes})


class EngineSettings(UserSettings, ForcedSettings):
    """All settings of the engine."""
