"""Distillation onto the grid: trains a quantized file towards the distributions of the unquantized model.

It trains the F16 numbers of the blocks that `GRIDS` describes, the output head's included, and the norms.
These numbers are `d`, of which all scales of a block are multiples, and `dmin`, of which its minima are
multiples. Codes and everything else stay. The loss is the mean KL divergence from the unquantized model over
a text. In every step the values are those that the file can hold. Gradients pass through the rounding to F16
as if there were none (Bengio et al. 2013, arXiv 1308.3432).

torch and transformers are optional, so this module is imported only where it is used.
"""

from __future__ import annotations

import gc
import math
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.utils import logging

from qwen_serve.convert.chunks import read_chunks
from qwen_serve.convert.compensation.arrays import release
from qwen_serve.convert.compensation.grids import GRIDS, Blocks
from qwen_serve.convert.compensation.packing import pack, unpack
from qwen_serve.convert.config import FULL, LINEAR, ModelConfig
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.progress import Progress
from qwen_serve.convert.tensors import EMBEDDING, OUTPUT, expected_tensors
from qwen_serve.convert.transforms import add_one, decay, tile_columns, tile_heads
from qwen_serve.llamacpp.gguf import Metadata, read_header
from qwen_serve.llamacpp.weights import dequantize_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from qwen_serve.convert.tensors import Rule
    from qwen_serve.llamacpp.evaluation import Runtime
    from qwen_serve.llamacpp.gguf import Header, TensorInfo

    Turn: TypeAlias = Callable[[Tensor], Tensor]

logging.set_verbosity_error()  # it recommends faster kernels

BATCH: Final = 4
"""Chunks of 512 tokens in a step."""

HELD_BACK: Final = 16
"""Of this many chunks one is not trained on; it shows whether training helped."""

RATE: Final = 4e-3
"""Adam's learning rate for a type's F16 numbers, relative to their size and divided by the type's number of
levels."""

NORM_RATE: Final = 5e-4
WARM_UP: Final = 10
"""Steps in which the learning rates rise; after them they fall as a cosine."""

LOGITS: Final = 1 << 27
"""Most logits of either model at a time; there are a few copies in float32."""

ON_GPU: Final = torch.bfloat16
"""Type of the weights on a GPU; trained numbers are float32."""

PIECE: Final = 1 << 26
"""Weights that are dequantized together."""


def distill(base: Path, quantized: Path, *, text: Path, steps: int, runtime: Runtime) -> None:
    """Trains `quantized`, which was made from `base`, in place.

    Args:
        text: the text, which is read in chunks of 512 tokens.
        steps: number of steps, of `BATCH` chunks each.
        runtime: with layers on a GPU, torch trains there in BF16, else on the CPU in float32.

    Raises:
        ConvertError: the text is too short, the model's positions are scaled, or training did not help.
        LlamaError: the model cannot be loaded.
    """
    header = read_header(base)
    settings = _settings(header)
    with runtime.load(base) as model:
        chunks = torch.tensor(read_chunks(model, text).astype(np.int64))
    if len(chunks) < 2:
        raise ConvertError(f"{text}: {chunks.numel()} tokens; distillation needs two chunks of 512 or more")
    on_gpu = runtime.n_gpu_layers != 0 and torch.cuda.is_available()
    torch.set_num_threads(runtime.n_threads)
    student = _Student(header, quantized, settings, torch.device("cuda" if on_gpu else "cpu"))
    _train(student, chunks, steps)
    student.save()
    del student
    gc.collect()
    release()  # llama.cpp needs the GPU's memory next


def _settings(header: Header) -> dict[str, Any]:
    """The file's shapes as `config.json` spells them (the inverse of qwen_serve/convert/metadata.py)."""
    arch = str(header.metadata["general.architecture"])
    values = Metadata(header, arch)
    if (scaling := values.get("rope.scaling.type")) is not None:
        raise ConvertError(f"{header.path}: positions are scaled ({scaling}); convert without --distill")
    layers = values.integer("block_count") - values.integer("nextn_predict_layers", 0)
    recurrent = values.integers("attention.recurrent_layers")[:layers]
    width = values.integer("attention.key_length")
    return {
        "architectures": [Qwen3_5ForCausalLM.__name__],
        "vocab_size": header.tensors[EMBEDDING.target].shape[1],
        "hidden_size": values.integer("embedding_length"),
        "intermediate_size": values.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "layer_types": [LINEAR if here else FULL for here in recurrent],
        "num_attention_heads": values.integer("attention.head_count"),
        "num_key_value_heads": values.integer("attention.head_count_kv"),
        "head_dim": width,
        "linear_num_key_heads": values.integer("ssm.group_count"),
        "linear_num_value_heads": values.integer("ssm.time_step_rank"),
        "linear_key_head_dim": values.integer("ssm.state_size"),
        "linear_value_head_dim": values.integer("ssm.state_size"),
        "linear_conv_kernel_dim": values.integer("ssm.conv_kernel"),
        "rms_norm_eps": values.get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": values.integer("context_length"),
        "tie_word_embeddings": OUTPUT.target not in header.tensors,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": values.get("rope.freq_base"),
            "partial_rotary_factor": values.integer("rope.dimension_count") / width,
            "mrope_section": list(values.integers("rope.dimension_sections")[:3]),
            "mrope_interleaved": True,
        },
    }


def _train(student: _Student, chunks: Tensor, steps: int) -> None:
    """Runs Adam over the chunks in random order, except those held back."""
    held_back, chunks = chunks[::HELD_BACK], chunks[[i for i in range(len(chunks)) if i % HELD_BACK]]
    batch, random = min(BATCH, len(chunks)), torch.Generator().manual_seed(0)
    adam = torch.optim.Adam(student.groups(), betas=(0.9, 0.98))
    rates = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda step: min(1, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    order = torch.empty(0, dtype=torch.int64)
    with Progress("Distillation", steps, "steps") as progress:
        before = student.divergence(held_back)
        for _ in range(steps):
            if len(order) < batch:
                order = torch.randperm(len(chunks), generator=random)
            here, order = order[:batch], order[batch:]
            progress.note(f"KLD {student.divergence(chunks[here], train=True):.5f}")
            adam.step()
            adam.zero_grad()
            rates.step()
            progress.advance()
        after = student.divergence(held_back)
        found = f"mean KLD {before:.5f} -> {after:.5f} on {held_back.numel():,} tokens held back"
        progress.note(found)
    if not after < before:
        raise ConvertError(f"distillation did not help ({found}): convert without --distill")


class _Student:
    """The whole model in torch, whose weights can be exchanged for those of the quantized file."""

    def __init__(self, header: Header, quantized: Path, settings: dict[str, Any], device: Any) -> None:
        self._path, self._device = quantized, device
        config = ModelConfig.from_json(settings)
        before = torch.get_default_dtype()
        torch.set_default_dtype(ON_GPU if device.type == "cuda" else torch.float32)
        try:
            with device:
                self._model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings))
        finally:
            torch.set_default_dtype(before)
        self._model.requires_grad_(False)
        self._model.activation_checkpointing_enable()
        self._model.train()  # otherwise each layer keeps everything for the gradients; no dropout
        self._parts: list[_Part] = []
        tensors = read_header(quantized).tensors
        with header.path.open("rb") as whole, quantized.open("rb") as file:
            for source, target, rule in expected_tensors(config, "model.", range(config.n_layers), False):
                parameter = self._model.get_parameter(source)
                turn = _turn(rule, config, parameter.shape)
                values = turn(torch.tensor(_values(whole, header.tensors[target]))).to(device)
                parameter.data = values.to(parameter.dtype if values.ndim > 1 else torch.float32)
                if (part := _part(file, tensors[target], turn, device, self._model.dtype)) is None:
                    continue
                self._parts.append(part)
                tied = rule is EMBEDDING and config.tied_embeddings
                for name in (source, OUTPUT.source) if tied else (source,):
                    module, _, weight = name.rpartition(".")
                    register_parametrization(self._model.get_submodule(module), weight, part, unsafe=True)

    def groups(self) -> list[dict[str, Any]]:
        """The parameters that Adam trains, and their learning rates."""
        return [{"params": [value], "lr": part.rate} for part in self._parts for value in part.parameters()]

    def divergence(self, chunks: Tensor, *, train: bool = False) -> float:
        """The mean KL divergence of the file's distributions from the whole model's over `chunks` [chunks,
        tokens]; to train, also adds its gradients to the parameters'."""
        total, at_once = 0.0, max(1, LOGITS // (chunks.shape[1] * self._model.vocab_size))
        for ids in chunks.to(self._device).split(at_once):
            with torch.no_grad():
                target = self._distributions(ids, quantized=False)
            with torch.set_grad_enabled(train):
                found = self._distributions(ids, quantized=True)
                part = F.kl_div(found, target, reduction="sum", log_target=True) / chunks.numel()
            if train:
                part.backward()
            total += float(part.detach())
        return total

    def save(self) -> None:
        """Writes the trained numbers to the file."""
        with self._path.open("r+b") as file, torch.no_grad():
            for part in self._parts:
                file.seek(part.tensor.offset)
                file.write(part.data())

    def _distributions(self, ids: Tensor, *, quantized: bool) -> Tensor:
        for part in self._parts:
            part.active = quantized
        return F.log_softmax(self._model(ids, use_cache=False).logits.float(), -1)


class _Part(nn.Module):
    """A tensor of the file, which takes the place of the whole model's while it is `active`."""

    rate = 0.0

    def __init__(self, tensor: TensorInfo, turn: Turn) -> None:
        super().__init__()
        self.tensor, self.active, self._turn = tensor, False, turn

    def forward(self, whole: Tensor) -> Tensor:
        return self._turn(self.values()).to(whole.dtype) if self.active else whole

    def values(self) -> Tensor:
        """The values that the file has, in torch's order of dimensions."""
        raise NotImplementedError

    def data(self) -> bytes:
        """The bytes that the file has."""
        raise NotImplementedError


class _Norm(_Part):
    rate = NORM_RATE

    def __init__(self, tensor: TensorInfo, values: Tensor, turn: Turn) -> None:
        super().__init__(tensor, turn)
        self._weight = nn.Parameter(values)

    def values(self) -> Tensor:
        return self._weight

    def data(self) -> bytes:
        return bytes(self._weight.detach().cpu().numpy().tobytes())


class _Fixed(_Part):
    """A quantized tensor of a type that `GRIDS` does not describe; it is not trained."""

    def __init__(self, tensor: TensorInfo, values: Tensor, data: bytes, turn: Turn) -> None:
        super().__init__(tensor, turn)
        self._values, self._data = values, data

    def values(self) -> Tensor:
        return self._values

    def data(self) -> bytes:
        return self._data


class _Grid(_Part):
    """A matrix of blocks. Its F16 numbers are trained as factors on their first values."""

    def __init__(self, tensor: TensorInfo, blocks: Blocks, turn: Turn, dtype: Any) -> None:
        super().__init__(tensor, turn)
        self._blocks, self._dtype = blocks, dtype
        self.rate = RATE / len(blocks.grid.levels)
        self._d = nn.Parameter(torch.ones_like(blocks.d))
        if blocks.grid.minima:
            self._dmin = nn.Parameter(torch.ones_like(blocks.dmin))

    def values(self) -> Tensor:
        rows = max(1, PIECE // len(self._blocks.levels))
        pieces = [slice(first, first + rows) for first in range(0, self._d.shape[1], rows)]
        # dequantized again for the gradients, so that nothing is kept
        return torch.cat([checkpoint(self._piece, piece, use_reentrant=False) for piece in pieces])

    def data(self) -> bytes:
        return pack(Type(self.tensor.type), self._trained(slice(None))).tobytes()

    def _piece(self, rows: slice) -> Tensor:
        return self._trained(rows).values().T.to(self._dtype)

    def _trained(self, rows: slice) -> Blocks:
        was = self._blocks
        d, dmin = _half(was.d[:, rows] * self._d[:, rows]), was.dmin[:, rows]
        if was.grid.minima:
            dmin = _half(dmin * self._dmin[:, rows])
        levels, scales, minima = (array[:, rows] for array in (was.levels, was.scales, was.minima))
        return Blocks(was.grid, levels, scales, minima, d, dmin)


def _half(values: Tensor) -> Tensor:
    """The values rounded to F16; gradients pass as if they were not rounded."""
    return values + (values.half().float() - values).detach()


def _turn(rule: Rule, config: ModelConfig, shape: Any) -> Turn:
    """The function from a GGUF tensor's values to the checkpoint's, of this shape: a rule backwards."""
    axis = 1 if rule.reorder is tile_columns else 0
    reorder = tile_heads if rule.compute is decay else rule.reorder
    back: Tensor | None = None
    if reorder is not None:
        places = np.arange(shape[axis])
        moved = reorder(places[None] if axis else places[:, None], config)
        back = torch.tensor(np.argsort(moved.reshape(-1)))

    def turn(values: Tensor) -> Tensor:
        if back is not None:
            values = values.index_select(axis, back.to(values.device))
        if rule.compute is add_one:
            values = values - 1
        elif rule.compute is decay:
            values = (-values).log()
        return values.reshape(shape)

    return turn


def _part(file: BinaryIO, tensor: TensorInfo, turn: Turn, device: Any, dtype: Any) -> _Part | None:
    """The part that replaces a tensor; None for a tensor that is unchanged from the unquantized model."""
    kind = Type(tensor.type)
    if kind in GRIDS:
        was = unpack(kind, _data(file, tensor).reshape(tensor.shape[1], -1))
        names = ("levels", "scales", "minima", "d", "dmin")
        arrays = {name: torch.tensor(getattr(was, name)).to(device) for name in names}
        return _Grid(tensor, Blocks(was.grid, **arrays), turn, dtype)
    if tensor.name.endswith("norm.weight"):
        return _Norm(tensor, torch.tensor(_values(file, tensor)).to(device), turn)
    if kind in (Type.F32, Type.F16, Type.BF16):
        return None
    return _Fixed(tensor, torch.tensor(_values(file, tensor)).to(device), _data(file, tensor).tobytes(), turn)


def _data(file: BinaryIO, tensor: TensorInfo) -> NDArray[np.uint8]:
    file.seek(tensor.offset)
    return np.fromfile(file, np.uint8, tensor.n_bytes)


def _values(file: BinaryIO, tensor: TensorInfo) -> NDArray[np.float32]:
    """A tensor's values in torch's order of dimensions."""
    rows = _data(file, tensor).reshape(-1, tensor.n_bytes // max(1, tensor.n_elements // tensor.shape[0]))
    return dequantize_rows(rows, Type(tensor.type)).reshape(tensor.shape[::-1])
