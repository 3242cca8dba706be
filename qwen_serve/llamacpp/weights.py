"""Changes the weights of a loaded model in place, as quantizing a tensor would, without a file."""

import ctypes
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from qwen_serve.common.interrupts import held

from . import ggml
from .errors import LlamaError
from .evaluation import Batch, ContextKind, EvalContext
from .ggml import Tensor, declare
from .model import Model
from .probe import EvalCallback, Floats
from .quantize import FLOATS

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ROW_ELEMENTS: Final = 1 << 16  # of one call, so that threads share large tensors


class _Traits(ctypes.Structure):
    """`struct ggml_type_traits` of `ggml.h`; its sizes are checked against gguf's below."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, FLOATS, ctypes.c_int64)),
        ("from_float_ref", ctypes.CFUNCTYPE(None, FLOATS, ctypes.c_void_p, ctypes.c_int64)),
    ]


_quantize_chunk = declare(
    "ggml_quantize_chunk",
    ctypes.c_size_t,
    ctypes.c_int,
    FLOATS,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_int64,
    FLOATS,
)
_quantize_init = declare("ggml_quantize_init", None, ctypes.c_int)
_traits_of = declare("ggml_get_type_traits", ctypes.POINTER(_Traits), ctypes.c_int)


@cache
def _traits(kind: GGMLQuantizationType) -> _Traits:
    traits: _Traits = _traits_of(int(kind)).contents
    if (traits.blck_size, traits.type_size) != GGML_QUANT_SIZES[kind]:
        raise LlamaError(f"struct ggml_type_traits is not what llamacpp/weights.py declares ({kind.name})")
    return traits


def quantize_rows(
    values: Floats, kind: GGMLQuantizationType, columns: Floats | None, threads: int = 1
) -> Bytes:
    """Quantizes `values` [matrices, rows, width] to `kind` as llama-quantize does: [matrices, rows, bytes of
    a row].

    Args:
        columns: [matrices, width] mean squared inputs, the weights of errors; None: all errors weigh the
        same.
    """
    matrices, rows, width = values.shape
    block, n_bytes = GGML_QUANT_SIZES[kind]
    out = np.empty((matrices, rows, width // int(block) * int(n_bytes)), np.uint8)
    values = np.ascontiguousarray(values, np.float32)
    if kind == GGMLQuantizationType.F32:
        return values.view(np.uint8)
    traits = _traits(kind)
    if traits.is_quantized:
        _quantize_init(int(kind))
    step = max(1, ROW_ELEMENTS // width)

    def work(at: tuple[int, int]) -> None:
        matrix, first = at
        source = values[matrix, first : first + step]
        if not traits.is_quantized:
            target = out[matrix, first : first + step]
            traits.from_float_ref(source.ctypes.data_as(FLOATS), target.ctypes.data, source.size)
            return
        weights = np.ascontiguousarray(columns[matrix], np.float32) if columns is not None else None
        _quantize_chunk(
            int(kind),
            source.ctypes.data_as(FLOATS),
            out[matrix, first : first + step].ctypes.data,
            0,
            len(source),
            width,
            weights.ctypes.data_as(FLOATS) if weights is not None else None,
        )

    pieces = [(matrix, first) for matrix in range(matrices) for first in range(0, rows, step)]
    with held(), ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, pieces))
    return out


def dequantize_rows(data: Bytes, kind: GGMLQuantizationType, threads: int = 1) -> Floats:
    """The values [..., width] of `data` [..., bytes of a row] of type `kind`."""
    block, n_bytes = GGML_QUANT_SIZES[kind]
    if kind == GGMLQuantizationType.F32:
        return data.view(np.float32)
    data = np.ascontiguousarray(data)
    width, traits = data.shape[-1] // int(n_bytes) * int(block), _traits(kind)
    out = np.empty((*data.shape[:-1], width), np.float32)
    source, target = data.reshape(-1, data.shape[-1]), out.reshape(-1, width)
    step = max(1, ROW_ELEMENTS // width)

    def work(first: int) -> None:
        rows = target[first : first + step]
        traits.to_float(source[first:].ctypes.data, rows.ctypes.data_as(FLOATS), rows.size)

    with held(), ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(0, len(source), step)))
    return out


class Finder(EvalCallback):
    """Records the addresses of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, set[int]] = defaultdict(set)

    def _see(self, tensor: Tensor, ask: bool) -> bool:
        for source in filter(None, tensor.src if ask else ()):
            # names of the scheduler's copies, `CUDA0#blk.0.attn_k.weight#0`, end otherwise
            if (name := Tensor.from_address(source).name.decode()).endswith(".weight"):
                self.found[name].add(source)
        return not ask


class Weights:
    """The matrices of `model`, which must be writable, by name.

    Raises:
        LlamaError: the model cannot be run.
    """

    def __init__(self, model: Model, threads: int = 1) -> None:
        self._threads, finder = threads, Finder()
        with self._context(model, "trunk", finder) as context:
            context.keep_hidden()
            batch = Batch(context)
            batch.add(0, 0, output=True)
            context.decode(batch)
            hidden = context.hidden().copy()
        if model.n_nextn:
            with self._context(model, "mtp", finder) as context:
                batch = Batch(context)
                batch.add(0, 1, output=True, hidden=hidden[0])
                context.decode(batch)
        self._tensors = {
            # a tensor that is embedding and head has a copy on the GPU beside the one in host memory
            name: [Tensor.from_address(address) for address in sorted(addresses)]
            for name, addresses in finder.found.items()
        }
        self._originals: dict[str, Bytes] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def values(self, name: str) -> Floats:
        """The file's values [matrices, rows, width], even if the model's are changed."""
        tensor = self._tensors[name][0]
        kind = GGMLQuantizationType(tensor.type)
        data = self._originals[name] if name in self._originals else self._read(tensor)
        return dequantize_rows(data.reshape(tensor.ne[2], tensor.ne[1], -1), kind, self._threads)

    def set(self, name: str, values: Floats, *, for_good: bool = False) -> None:
        """Replaces a tensor by `values` [matrices, rows, width] in the model's own type.

        `for_good`: the file's values are not kept, which would take as much memory as the matrices.
        """
        tensors = self._tensors[name]
        if not for_good and name not in self._originals:
            self._originals[name] = self._read(tensors[0])
        self._put(tensors, quantize_rows(values, GGMLQuantizationType(tensors[0].type), None, self._threads))

    def restore(self, name: str) -> None:
        """Restores the file's values."""
        if (data := self._originals.pop(name, None)) is not None:
            self._put(self._tensors[name], data)

    def changed(self) -> Iterator[str]:
        """Names of the tensors that differ from the file."""
        return iter(tuple(self._originals))

    def _context(self, model: Model, kind: ContextKind, finder: Finder) -> EvalContext:
        # op_offload would show copies of weights that are in host memory
        return EvalContext(
            model, n_ctx=64, n_batch=2, kind=kind, callback=finder, op_offload=False, threads=self._threads
        )

    @staticmethod
    def _read(tensor: Tensor) -> NDArray[np.uint8]:
        data = np.empty(ggml.nbytes(tensor), np.uint8)
        ggml.tensor_get(ctypes.addressof(tensor), data.ctypes.data, 0, data.nbytes)
        return data

    @staticmethod
    def _put(tensors: Sequence[Tensor], data: Bytes) -> None:
        for tensor in tensors:
            ggml.tensor_set(ctypes.addressof(tensor), data.ctypes.data, 0, data.nbytes)
