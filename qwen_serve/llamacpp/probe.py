"""Inputs of a graph's matrix products, for importance matrices."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np
from numpy.typing import NDArray

from . import ggml
from .ggml import MUL_MAT, MUL_MAT_ID, Tensor

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Routing:
    """Which of the `experts` matrices reads which row.

    Row `token * slots + i % slots` goes to matrix `ids[token, i]`; `ids` is [tokens, used]. A token has one
    row for all of its experts (`slots` is 1), or one for each (`slots` is `used`).
    """

    experts: int
    ids: NDArray[np.int32]
    slots: int


Observer = Callable[[str, Floats, Routing | None], None]


class EvalCallback:
    """Observes a graph as it is computed. An exception must not pass through C: it is kept, and `reraise`
    raises it after the graph has stopped."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self.interrupts: Sequence[int] = ()
        """Signals held until the graph stops."""
        self.function = C.ggml_backend_sched_eval_callback(self._on_eval)
        """The `ggml_backend_sched_eval_callback`."""

    def reraise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _on_eval(self, pointer: int, ask: bool, _: Any) -> bool:
        if self.interrupts:
            return ask  # true asks for the second call, false stops
        try:
            return self._see(Tensor.from_address(pointer), ask)
        except BaseException as error:
            self._error = error
            return False

    def _see(self, tensor: Tensor, ask: bool) -> bool:
        """Returns with `ask` whether to be called again with the computed tensor, else whether to go on."""
        raise NotImplementedError


class Probe(EvalCallback):
    """The eval callback: passes the F32 inputs of selected matmuls to an observer (as `llama-imatrix` does).

    Adjacent matmuls that read the same tensor (such as q, k and v) get the same array, read once, and those
    with the same routing (experts' gate and up projection) the same `Routing`.
    """

    def __init__(self, observe: Observer, observes: Callable[[str], bool] = lambda name: True) -> None:
        super().__init__()
        self._observe, self._observes = observe, observes
        self._source, self._rows = 0, np.empty((0, 0), np.float32)
        self._routed: tuple[int, int] = (0, 0)
        self._routing: Routing | None = None

    def reraise(self) -> None:
        self._source, self._routed = 0, (0, 0)
        super().reraise()

    def _see(self, tensor: Tensor, ask: bool) -> bool:
        if tensor.op not in (MUL_MAT, MUL_MAT_ID):
            return not ask
        weight = Tensor.from_address(tensor.src[0])
        name = _weight_name(weight.name)
        rows = Tensor.from_address(tensor.src[1])
        if rows.type != C.GGML_TYPE_F32 or not self._observes(name):
            return not ask
        if not ask:
            if tensor.src[1] != self._source:
                self._source, self._rows = tensor.src[1], _read_rows(rows)
            self._observe(name, self._rows, self._route(tensor, weight, rows))
        return True

    def _route(self, product: Tensor, weight: Tensor, rows: Tensor) -> Routing | None:
        """A product's routing; None if it has one matrix."""
        if product.op != MUL_MAT_ID:
            return None
        if (product.src[1], product.src[2]) != self._routed:
            ids = _read(Tensor.from_address(product.src[2]), np.int32)
            self._routing = Routing(weight.ne[2], ids.reshape(-1, ids.shape[-1]).copy(), rows.ne[1])
            self._routed = (product.src[1], product.src[2])
        return self._routing


def _weight_name(name: bytes) -> str:
    """`CUDA0#blk.0.attn_k.weight#0` -> `blk.0.attn_k.weight`: the scheduler adds to the names of weights'
    copies."""
    parts = name.decode().split("#")
    return parts[1] if len(parts) > 1 else parts[0]


def _read_rows(tensor: Tensor) -> Floats:
    """An F32 tensor as [rows, ne0]: a view of host memory, or a copy of device memory."""
    return _read(tensor, np.float32).reshape(-1, tensor.ne[0])


def _read(tensor: Tensor, dtype: type[np.generic]) -> NDArray[Any]:
    """[ne3, ne2, ne1, ne0]: a view of host memory, or a copy of device memory."""
    n_bytes = ggml.nbytes(tensor)
    if ggml.is_host(tensor.buffer):
        raw = (ctypes.c_char * n_bytes).from_address(tensor.data)
    else:
        raw = (ctypes.c_char * n_bytes)()
        ggml.tensor_get(ctypes.addressof(tensor), raw, 0, n_bytes)
    shape, strides = tuple(reversed(tensor.ne)), tuple(reversed(tensor.nb))
    return np.ndarray(shape, dtype, raw, strides=strides)
