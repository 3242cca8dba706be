"""Sizes of a model and a draft model, from the metadata and the tensors of their files.

llama.cpp divides by a file's numbers, allocates by them, or aborts. So a value that makes no sense is refused
with an error that names its key, the value and what would be right. Sources: `load_hparams` in
llama-model.cpp, models/qwen35.cpp, qwen35moe.cpp and dflash.cpp.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm
from pathlib import Path
from typing import Self

import numpy as np

from qwen_serve.llamacpp import CACHE_TYPES, is_quantized, row_bytes
from qwen_serve.llamacpp.errors import ModelLoadError
from qwen_serve.llamacpp.file_checks import check_model
from qwen_serve.llamacpp.gguf import Header, Metadata, TensorInfo, read_model
from qwen_serve.server.engine.model_file import ModelFile
from qwen_serve.server.engine.settings import EngineSettings

from .adapters import AdapterSpec
from .vision import VisionSpec

ARCHITECTURES = ("qwen35", "qwen35moe")
"""llama.cpp's names of Qwen3.5 (`general.architecture`), dense and with experts."""

DRAFT_ARCHITECTURE = "dflash"
"""llama.cpp's name for block drafters."""

MAX_BLOCK = 256
"""Maximum tokens of a block; each is a row of one pass."""

TOKENS, EMBEDDING = "tokenizer.ggml.tokens", "token_embd.weight"

MAX_LAYERS = 512
"""`LLAMA_MAX_LAYERS`."""

MAX_MTP = 1
"""Maximum MTP blocks: `QWEN35 MTP currently only supports a single MTP block`."""

MAX_EXPERTS = 1024
"""`LLAMA_MAX_EXPERTS`."""

MAX_HEADS, MAX_HEAD_SIZE, MAX_WIDTH = 2**12, 2**13, 2**20
"""Bounds far above every Qwen's values; products of them fit 64 bits."""

MAX_KERNEL = 64
"""Maximum tokens that the convolution before a recurrent layer sees."""

log = logging.getLogger(__name__)

PRE = "tokenizer.ggml.pre"
"""The key that names how text is split before it is tokenized."""

_BLOCK = re.compile(r"blk\.(\d{1,6})\.")


@dataclass(frozen=True)
class Part:
    """Sizes of a layer, of the output head, or of a draft model."""

    weights: int = 0
    """Bytes."""
    copies: int = 0
    """Bytes of FP16 copies of quantized matrices; experts' and a draft model's matrices have none."""
    kv: tuple[int, int] = (0, 0)
    """Keys and values of one token, in elements."""
    state: int = 0
    """Bytes of one sequence's recurrent state, F32."""
    delta: int = 0
    """Those of the delta net's part, the rest is the convolution's."""
    operand: int = 0
    """Bytes of a verified token's operands, F32."""

    @classmethod
    def of(
        cls,
        tensors: Iterable[TensorInfo],
        kv: tuple[int, int] = (0, 0),
        recurrence: tuple[int, int, int] = (0, 0, 0),
    ) -> Self:
        """Sum up `tensors`, with copies as `llama_model_keep_f16_copies` of llama-model.cpp chooses them."""
        weights = copies = 0
        for tensor in tensors:
            weights += tensor.n_bytes
            copies += 2 * tensor.n_elements if len(tensor.shape) == 2 and is_quantized(tensor.type) else 0
        return cls(weights, copies, kv, *recurrence)

    def state_in(self, settings: EngineSettings) -> int:
        """Bytes of one sequence's recurrent state, as it is kept."""
        return self.state - (self.delta // 2 if settings.state_type == "f16" else 0)

    def cell(self, settings: EngineSettings) -> int:
        """Bytes of one token's keys and values, as the cache stores them."""
        types = settings.cache_type_k, settings.cache_type_v
        return sum(row_bytes(CACHE_TYPES[kind], n) for kind, n in zip(types, self.kv, strict=True))


@dataclass(frozen=True)
class ModelSpec:
    """A model's parts and sizes."""

    file: ModelFile = field(compare=False)
    n_blocks: int
    """Layers in the file, multi-token-prediction blocks included."""
    n_embd: int
    """Elements of a hidden state."""
    n_vocab: int
    """Tokens of the vocabulary; 0 if the file has none."""
    n_ctx_train: int
    """Tokens of the longest sequence that the model was trained for."""
    layers: tuple[Part, ...]
    """Layers of the trunk."""
    mtp: Part
    """The multi-token-prediction block; loaded only if it drafts."""
    head: Part
    """The final norm and the output head; a tied head is a second copy of the embedding."""
    input_weights: int
    """Bytes of the token embedding."""
    embedding_type: int
    """ggml's number for its type (`enum ggml_type`)."""
    output_is_tied: bool
    has_experts: bool = False
    draft: DraftSpec | None = None
    """The draft model, if there is one."""
    vision: VisionSpec | None = None
    """The vision tower, if there is one."""
    adapters: tuple[AdapterSpec, ...] = ()
    """The LoRA adapters, in order of their numbers."""

    @property
    def weights(self) -> int:
        """Bytes of weights that a step reads: the trunk and the head."""
        return self.head.weights + sum(layer.weights for layer in self.layers)

    @property
    def state(self) -> int:
        """Bytes of one sequence's recurrent state in all layers, F32."""
        return sum(layer.state for layer in self.layers)

    def state_in(self, settings: EngineSettings) -> int:
        """Bytes of one sequence's recurrent state in all layers, as it is kept."""
        return sum(layer.state_in(settings) for layer in self.layers)

    def cell(self, settings: EngineSettings) -> int:
        """Bytes of one token in all layers."""
        return sum(layer.cell(settings) for layer in self.layers)

    @classmethod
    def from_header(cls, header: Header) -> Self:
        """Raises ModelLoadError for another architecture, and if metadata are missing or make no sense.

        Source for the state of layers: llama.cpp's llama-hparams.cpp.
        """
        if (arch := header.metadata.get("general.architecture")) not in ARCHITECTURES:
            raise ModelLoadError(
                f"{header.name} is of architecture {arch!r}; this server runs Qwen3.5 "
                f"({' or '.join(ARCHITECTURES)})"
            )
        metadata = Metadata(header, str(arch))
        n_ctx_train = metadata.integer("context_length", least=1)
        n_blocks = metadata.integer("block_count", least=1)
        n_mtp = metadata.integer("nextn_predict_layers", 0)
        n_trunk = n_blocks - n_mtp
        blocks: dict[int, list[TensorInfo]] = defaultdict(list)
        inputs: list[TensorInfo] = []
        outputs: list[TensorInfo] = []
        for name, tensor in header.tensors.items():
            block = _BLOCK.match(name)
            group = blocks[int(block[1])] if block else inputs if name.startswith("token_embd") else outputs
            group.append(tensor)
        if n_blocks != len(blocks) or n_blocks != max(blocks) + 1 or n_trunk < 1:
            raise ModelLoadError(
                f"{header.name}: by its metadata it has {n_blocks:,} layers, {n_mtp:,} of them to "
                f"predict further tokens; there are tensors of {len(blocks):,}"
            )
        metadata.relate("block_count", n_blocks <= MAX_LAYERS, f"at most {MAX_LAYERS}")
        metadata.relate("nextn_predict_layers", n_mtp <= MAX_MTP, f"at most {MAX_MTP}")
        keys, values = _attention(metadata)
        recurrence = _recurrence(metadata)
        _check_experts(metadata, header)
        heads = _by_layer(metadata, "attention.head_count", n_blocks, n_trunk)
        heads_kv = _by_layer(metadata, "attention.head_count_kv", n_blocks, n_trunk, default=heads[0])
        recurrent = _by_layer(metadata, "attention.recurrent_layers", n_blocks, n_trunk)
        if any(recurrence) and metadata.get("attention.recurrent_layers") is None:
            interval = metadata.integer("full_attention_interval", 4, least=1)
            recurrent = [layer % interval != interval - 1 for layer in range(n_blocks)]
        parts = [
            Part.of(blocks[i], recurrence=recurrence)
            if recurrent[i] and i < n_trunk
            else Part.of(blocks[i], (heads_kv[i] * keys, heads_kv[i] * values))
            for i in range(n_blocks)
        ]
        is_tied = "output.weight" not in header.tensors
        embedding = header.tensors.get(EMBEDDING)
        return cls(
            file=ModelFile.of(header.path, header.status),
            n_blocks=n_blocks,
            n_embd=metadata.integer("embedding_length"),
            n_vocab=header.lengths.get(TOKENS, 0),
            n_ctx_train=n_ctx_train,
            layers=tuple(parts[:n_trunk]),
            mtp=parts[n_trunk] if n_mtp else Part(),
            head=Part.of([*outputs, *inputs] if is_tied else outputs),
            input_weights=sum(tensor.n_bytes for tensor in inputs),
            embedding_type=embedding.type if embedding else 0,
            output_is_tied=is_tied,
            has_experts=bool(metadata.get("expert_count")),
        )


def _by_layer(
    metadata: Metadata, key: str, n_blocks: int, n_trunk: int, *, default: int = 0
) -> Sequence[int]:
    """One value for each block; the file may leave out blocks beyond the trunk."""
    values = (default,) if metadata.get(key) is None else metadata.integers(key)
    if len(values) == 1:
        values *= n_blocks
    if len(values) not in (n_blocks, n_trunk):
        raise metadata.unusable(key, f"one number, or one for each of {n_blocks} layers")
    return [*values, *[0] * (n_blocks - len(values))]


def _attention(metadata: Metadata) -> tuple[int, int]:
    """Elements of a head's keys and of its values. Raises ModelLoadError if heads, their sizes, or the
    number of elements with rotary positions make no sense."""
    n_embd = metadata.integer("embedding_length", least=1, most=MAX_WIDTH)
    if isinstance(metadata.get("feed_forward_length"), int):
        metadata.integer("feed_forward_length", least=1, most=MAX_WIDTH)
    heads = metadata.integers("attention.head_count")
    metadata.relate("attention.head_count", all(0 < n <= MAX_HEADS for n in heads), f"1 to {MAX_HEADS:,}")
    if metadata.get("attention.head_count_kv") is not None:
        heads_kv = metadata.integers("attention.head_count_kv")
        metadata.relate(
            "attention.head_count_kv",
            any(heads_kv) and all(not n or lcm(*heads) % n == 0 for n in heads_kv),
            f"a divisor of the number of heads, {heads[0]}",
        )
    size = n_embd // heads[0]
    key_length = metadata.integer("attention.key_length", size, least=1, most=MAX_HEAD_SIZE)
    value_length = metadata.integer("attention.value_length", size, least=1, most=MAX_HEAD_SIZE)
    turned = metadata.integer("rope.dimension_count", key_length, least=2, most=key_length)
    metadata.relate("rope.dimension_count", turned % 2 == 0, "even")
    if metadata.get("rope.dimension_sections") is not None:
        sections = metadata.integers("rope.dimension_sections")
        metadata.relate(
            "rope.dimension_sections",
            any(sections) and len(sections) <= 4 and sum(sections) <= turned // 2,
            f"up to 4 numbers that add up to 1 to {turned // 2}, half of rope.dimension_count",
        )
    return key_length, value_length


def _recurrence(metadata: Metadata) -> tuple[int, int, int]:
    """Bytes of a layer's recurrent state, of the delta net's part of it, and of a token's operands; 0 if the
    model has no such layers."""
    keys = [f"ssm.{key}" for key in ("state_size", "inner_size", "group_count", "time_step_rank")]
    if all(metadata.get(key) is None for key in [*keys, "ssm.conv_kernel"]):
        return 0, 0, 0
    kernel = metadata.integer("ssm.conv_kernel", least=1, most=MAX_KERNEL)
    state = metadata.integer("ssm.state_size", least=1, most=MAX_HEAD_SIZE)
    groups = metadata.integer("ssm.group_count", least=1, most=MAX_HEADS)
    inner = metadata.integer("ssm.inner_size", least=1, most=MAX_WIDTH)
    rank = metadata.integer("ssm.time_step_rank", inner // state, least=1, most=MAX_HEADS)
    metadata.relate("ssm.inner_size", inner == rank * state, f"{rank * state}, time_step_rank x state_size")
    metadata.relate("ssm.group_count", rank % groups == 0, f"a divisor of ssm.time_step_rank, {rank}")
    channels = inner + 2 * groups * state
    delta = 4 * inner * state
    return 4 * (kernel - 1) * channels + delta, delta, 4 * (channels + 2 * rank)


def _check_experts(metadata: Metadata, header: Header) -> None:
    """Check the number of experts and how many of them a token uses. Raises ModelLoadError."""
    there = any("_exps." in name for name in header.tensors)
    count = metadata.integer("expert_count", 0, most=MAX_EXPERTS)
    metadata.relate("expert_count", bool(count) == there, "1 or more with tensors of experts, else 0")
    used = metadata.get("expert_used_count")
    if isinstance(used, int) or count:
        metadata.integer("expert_used_count", 0, least=min(1, count), most=count)
    elif used is not None:
        raise ModelLoadError(f"{header.name}: expert_used_count is {used!r:.60} in a model without experts")
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        if isinstance(metadata.get(key), int):
            metadata.integer(key, least=1, most=MAX_WIDTH)
    if metadata.get("expert_group_count"):
        raise metadata.unusable("expert_group_count", "0 or missing: Qwen's experts have no groups")


def read_checked(path: Path) -> Header:
    """A model's header, whose types, shapes and keys fit each other, which llama.cpp takes for granted.

    Raises ModelLoadError.
    """
    header = read_model(path, "model")
    spec = ModelSpec.from_header(header)  # names another architecture
    check_model(header)
    if PRE not in header.metadata and "tokenizer.ggml.tokens" in header.metadata:
        log.warning(
            "%s: there is no %s: llama.cpp splits text by its default, not as Qwen3.5 does, so some text "
            "becomes other tokens; take a file of a newer converter",
            header.name,
            PRE,
        )
    if not any(map(any, (layer.kv for layer in spec.layers))):
        raise ModelLoadError(f"{header.name}: no layer has keys and values; every Qwen3.5 has some")
    if not spec.state:
        raise ModelLoadError(f"{header.name}: no layer has a recurrent state; every Qwen3.5 has some")
    return header


@dataclass(frozen=True)
class DraftSpec:
    """A block drafter."""

    file: ModelFile
    part: Part
    block: int
    """Tokens of a block, the newest one included."""
    mask: int
    """The mask token, which stands for each token to be guessed."""
    layers: tuple[int, ...]
    """Layers of the trunk whose inputs it reads."""
    n_embd: int
    """Elements of a hidden state, its own and the trunk's."""
    causal: bool

    @property
    def n_features(self) -> int:
        """Elements that it reads for each token."""
        return len(self.layers) * self.n_embd

    @classmethod
    def from_header(cls, header: Header, target: ModelSpec) -> Self:
        """Raises ModelLoadError for another kind of file or another model's drafter."""
        if (kind := header.metadata.get("general.architecture")) != DRAFT_ARCHITECTURE:
            raise ModelLoadError(
                f"{header.name} is of architecture {kind!r}; this server drafts with {DRAFT_ARCHITECTURE}"
            )
        if other := [name for name in header.tensors if name.startswith(("selector_", "markov_"))]:
            raise ModelLoadError(
                f"{header.name} has a tensor {other[0]}: a DFlash2 or DSpark drafter; "
                "this server drafts with DFlash"
            )
        metadata = Metadata(header, DRAFT_ARCHITECTURE)
        layers = metadata.integers("target_layers")
        n_embd, n_trunk = metadata.integer("embedding_length"), len(target.layers)
        if n_embd != target.n_embd or max(layers) >= n_trunk:
            raise ModelLoadError(
                f"{header.name} drafts for another model: its hidden states have {n_embd} elements and "
                f"it reads layers {', '.join(map(str, layers))}; the model's have {target.n_embd}, and it "
                f"has {n_trunk} layers"
            )
        if (n_vocab := header.lengths.get(TOKENS, 0)) != target.n_vocab:
            raise ModelLoadError(
                f"{header.name} drafts for another model: its vocabulary has {n_vocab:,} tokens, the model's "
                f"{target.n_vocab:,}"
            )
        _check_own_vocabulary(header, n_vocab)
        keys, values = _attention(metadata)
        n_layers = metadata.integer("block_count", least=1, most=MAX_LAYERS)
        there = len({name.split(".")[1] for name in header.tensors if name.startswith("blk.")})
        metadata.relate("block_count", n_layers == there, f"{there}, of so many layers there are tensors")
        heads = metadata.integer("attention.head_count_kv", least=1, most=MAX_HEADS)
        return cls(
            file=ModelFile.of(header.path, header.status),
            part=Part(
                weights=sum(tensor.n_bytes for tensor in header.tensors.values()),
                kv=(n_layers * heads * keys, n_layers * heads * values),
            ),
            block=metadata.integer("block_size", 16, least=2, most=MAX_BLOCK),
            mask=Metadata(header, "tokenizer.ggml").integer("mask_token_id", most=max(0, n_vocab - 1)),
            layers=layers,
            n_embd=n_embd,
            causal=metadata.get("attention.causal") is True,
        )


def _check_own_vocabulary(header: Header, n_vocab: int) -> None:
    """Check the tensor `d2t` of a drafter whose head covers only some of the target's tokens. It maps the
    head's rows to tokens, as whose logits llama.cpp stores them (src/models/dflash.cpp). Raises
    ModelLoadError."""
    if "d2t" not in header.tensors:
        return
    ids = header.tables.get("d2t", np.empty(0, np.int64))
    if "output.weight" not in header.tensors:
        wrong = "there is no output.weight for it"
    elif not ids.size:
        wrong = "it must be a table of 64-bit integers"
    elif ids.min() < 0 or ids.max() >= n_vocab:
        wrong = f"its tokens must be 0 to {n_vocab - 1}, and are {ids.min()} to {ids.max()}"
    elif len(np.unique(ids)) != len(ids):
        wrong = "it has a token twice"
    else:
        return
    raise ModelLoadError(f"{header.name}: tensor d2t, of a drafter with a reduced vocabulary: {wrong}")
