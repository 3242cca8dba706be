"""The engine's settings, with defaults that suit one GPU or a workstation without one.

Each setting is defined once: its default, its bounds, and below it a description. The command line, its help,
the environment, the settings file and every error message are generated from that (`server/settings.py`).
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
Speculation = Literal["auto", "off", "ngram", "mtp", "draft", "both"]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]

MAX_SEQUENCES = 256
"""llama.cpp refuses more sequence ids in one context (`LLAMA_MAX_SEQ`)."""

LONGEST_NAME = 256
"""Maximum characters of an adapter's name."""

THREADS_PER_CORE = 4
"""Maximum threads for each core: more are refused, since ggml's threads wait for each other in loops."""


class Section(BaseModel):
    """Settings that belong together; the title of the class is that of their group in `--help`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelSettings(Section, title="model"):
    """What is loaded, and where it goes."""

    model: Path
    """GGUF file, or a folder that holds exactly one"""
    n_gpu_layers: int = Field(-1, ge=-1)
    """layers on the GPU, counted from the last, the output head being one more; -1: all of them"""
    main_gpu: int = Field(0, ge=0)
    """index of the GPU to use, as llama.cpp numbers them"""
    split_mode: SplitMode = "none"
    """one GPU holds all layers ("none"), or all GPUs that the process sees share them out ("layer"), for
    models that are too large for one; steps go through them one after the other"""
    tensor_split: str | None = None
    """each GPU's share of the layers with split_mode=layer, such as 3,1; by free memory unless given"""
    offload_embedding: bool = True
    """put the token embedding on the GPU, too, where that is NVIDIA's, has all layers, and room; off: on the
    host, as llama.cpp does, which looks a prompt's tokens up there while the GPU waits"""
    f16_copies: F16Copies = "auto"
    """keep copies in FP16 of the quantized matrices beside them on the GPU, which products with many columns
    read: prompts, and steps of many sequences. They take 2 bytes a weight, 8.4 GB for a 4B. auto: on GPUs
    that are faster with them (NVIDIA's Hopper) where everything else leaves room for all of them"""
    use_mmap: bool = True
    """map the file instead of reading it: weights that stay on the host share the page cache"""
    mlock: bool = False
    """keep the weights that stay on the host from being paged out"""
    lora: str | None = None
    """LoRA adapters, as NAME=FILE.gguf, several with commas between or the flag again: a request has one
    applied that says its name as `model`, or its number in `lora`"""

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
    """Keys and values of all sequences."""

    ctx_size: int = Field(0, ge=0)
    """tokens that the KV cache holds, all sequences together; 0: 16,384 for each but no more than 262,144,
    and some for the prefix cache; or what fits"""
    flash_attn: FlashAttention = "auto"
    """flash attention"""
    cache_type_k: CacheType = "f16"
    """type of the cached keys"""
    cache_type_v: CacheType = "f16"
    """type of the cached values; a quantized one needs flash attention"""

    @model_validator(mode="after")
    def _packed_values_need_flash_attention(self) -> Self:
        if self.cache_type_v.startswith(("q", "iq")) and self.flash_attn == "off":
            raise ValueError(
                f"cache_type_v is {self.cache_type_v!r}, which needs flash attention; "
                "set flash_attn to 'auto' or 'on', or cache_type_v to 'f16'"
            )
        return self


class SchedulerSettings(Section, title="scheduler"):
    """Who runs, and what a step is."""

    parallel: int = Field(8, ge=1, le=MAX_SEQUENCES)
    """sequences that run at once, a recurrent state each; the others wait"""
    max_queue: int = Field(256, ge=0)
    """requests that may wait beyond those that run. A further one gets 429, unless its API key (or address,
    without one) has less than an equal part of them; at twice as many all get it"""
    scheduling_policy: SchedulingPolicy = "fair"
    """which waiting request is next. fair: each API key (or address, without one) gets its share and does not
    wait behind another's bulk job; for one alone this is first come, first served. priority: by the requests'
    service_tier and `priority`, the lower first. fcfs: first come, first served. With the first two an answer
    may lose its slot for a while; its state waits in the prefix cache"""
    batch_size: int = Field(0, ge=0)
    """most tokens in one step, and of prompts between two decode steps; 0: four passes (ubatch_size) on a
    GPU, 2,048 without one"""
    ubatch_size: int = Field(0, ge=0)
    """most tokens in one pass over the weights, which sets the size of the compute buffers; 0: 2,048 on a GPU
    if that fits, else 512"""
    prefill_seconds: float = Field(0.15, gt=0, allow_inf_nan=False)
    """about how long prefill steps delay running answers, to the nearest whole number of passes
    (ubatch_size), and without a GPU for 128 tokens at most; more gives more throughput if many requests
    arrive at once"""
    deterministic: bool = False
    """the same request gets the same answer whatever else is served: every sequence has KV cells of its own
    (ctx_size / parallel, and as many for each state of the prefix cache), and prompts are read in small
    passes, or cut at fixed places. Drafts, on the CPU from the text unless speculation says otherwise, need
    the patch batch-invariant. Slower; docs/deterministic.md says by how much"""
    remember: bool = True
    """keep what a start finds out (seconds of steps, sizes of buffers) for the next one with the same card,
    driver, build, model and settings, in files of the cache folder"""

    @model_validator(mode="after")
    def _a_token_for_each_sequence(self) -> Self:
        if 0 < self.batch_size < self.parallel:
            raise ValueError(
                f"batch_size is {self.batch_size}; it must be at least parallel ({self.parallel}), "
                "one token for each running sequence"
            )
        return self


class PrefixCacheSettings(Section, title="prefix cache"):
    """States of what was computed, for requests that begin alike."""

    prefix_cache: bool = True
    """start from the states that earlier prompts and answers left"""
    prefix_checkpoints: int = Field(0, ge=0)
    """states that the prefix cache may hold, a sequence id and a recurrent state each; 0: 32, or what fits.
    Where steps read their own cells only (an NVIDIA GPU with all layers, F16 cache, the patches
    attention-own-cells and kq-mask-in-place) more, up to all 256 ids: they and cells for them take at most
    half of the memory that is left"""
    prefix_cells: int = Field(0, ge=0)
    """KV cells that it may hold beyond those of running sequences, which take back what they need. 0: 131,072
    if steps read their own cells only; else, since others' cells make steps longer, a tenth of the bytes of
    the weights, at least 9,216, and fewer while less than half of the prompt tokens were read before"""
    prefix_interval: int = Field(4096, ge=0)
    """tokens between the states kept while a long prompt is read; 0: none on the way"""
    prefix_host_mib: int = Field(0, ge=0)
    """host memory for states evicted from the device, in MiB; 0: they are dropped"""
    prefix_file: Path | None = None
    """file in which states outlive a restart: written when the server stops, read when it starts if it is of
    the same model, build and settings"""
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
    """What drafts tokens, to be verified many at a time. Answers do not depend on it."""

    speculation: Speculation = "auto"
    """draft from the text itself where it repeats ("ngram"), with the checkpoint's own MTP head ("mtp"),
    whichever is faster at the moment ("both"), or not at all; auto: both on a GPU, ngram without one. A
    draft_model drafts beside these, or is the only drafter ("draft")"""
    draft_model: Path | None = None
    """GGUF file of a model that drafts for this one: a block drafter (DFlash), whose kind is read from it"""
    draft_window: int = Field(512, ge=1)
    """newest tokens of a sequence that the MTP head or the draft model reads before its first draft; their
    hidden states wait in memory. A draft model looks back on twice as many at most"""
    draft_max: int = Field(255, ge=1)
    """most tokens of a draft from the text"""
    mtp_depth: int = Field(16, ge=1)
    """most tokens of a draft from the MTP head"""
    snapshots: int = Field(-1, ge=-1)
    """rejected tokens that a lone sequence can take back without a copy of its state; each takes the memory
    of a recurrent state. -1: 8 with the MTP head, as many as a draft model's block has tokens, or what fits;
    else 0. With deterministic -1 is 0, and 15 are the most. With a stock llama.cpp each takes that for every
    sequence and every state of the prefix cache, and -1 is 2 with at most 8 sequences"""


class CpuSettings(Section, title="CPU"):
    """Threads that compute what is not on a GPU."""

    threads: int = Field(0, ge=0)
    """CPU threads for steps of one token; 0: one less than the physical cores that this process may use"""
    threads_batch: int = Field(0, ge=0)
    """CPU threads for larger steps; 0: as `threads`"""

    @field_validator("threads", "threads_batch")
    @classmethod
    def _no_crowd(cls, threads: int) -> int:
        most = THREADS_PER_CORE * physical_cores()
        if threads > most:
            raise ValueError(f"Input should be at most {most}, {THREADS_PER_CORE} for each physical core")
        return threads


class ForcedSettings(Section, title="forced"):
    """What tests and measurements force; else the engine decides. No flag, variable or key has it."""

    draft_always: bool = False
    """draft as far as possible whenever possible, rather than by what pays"""
    prefill_budget: int = Field(0, ge=0)
    """most prompt tokens in a step beside running answers; 0: as many as are read in prefill_seconds, by the
    fastest of the start's measurement and the steps since"""
    prefix_shrinks: bool = True
    """hold fewer cells, in proportion, while less than half of the prompt tokens were read before"""
    sampling: Sampling = "auto"
    """find the best tokens in the graph ("device"), so that a row's token comes to the host and not its
    logits, or on the host; auto: on the device if it is a GPU"""


class PictureSettings(Section, title="pictures"):
    """What the model sees."""

    mmproj: Path | None = None
    """GGUF file of the model's vision tower, for pictures in chats; what a conversion left beside the model
    (mmproj-NAME-*.gguf) is found, unless this is off. They are refused without"""
    mmproj_offload: bool = True
    """put the vision tower on the GPU, if there is one in use"""
    image_min_tokens: int = Field(0, ge=0)
    """tokens that a picture has at least: smaller ones are enlarged; 0: 8"""
    image_max_tokens: int = Field(0, ge=0, le=16384)
    """tokens that a picture has at most: larger ones are made smaller; 0: 4096"""
    image_cache_mib: int = Field(256, ge=0)
    """host memory for a cache of encoded pictures, which a chat sends again with every turn, in MiB"""

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
    """What users say of the engine. Zero means "choose for me" where noted.

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
        """A copy with other values, checked again."""
        return type(self)(**{**dict(self), **changes})


class EngineSettings(UserSettings, ForcedSettings):
    """Everything the engine needs to know before it loads a model."""
