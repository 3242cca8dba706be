"""Sums Gram matrices and rounds by them: with numpy here, or with torch on a GPU in a process of its own.

One process with torch and a llama.cpp whose libraries export a static C++ runtime can crash. Our builds no
longer export it (patches/apply.cmake), but other libraries may. So nothing that this module imports may load
llama.cpp.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from qwen_serve.convert.compensation.arrays import namespace, on_host, transposed
from qwen_serve.convert.compensation.grids import GRIDS
from qwen_serve.convert.compensation.packing import pack
from qwen_serve.convert.compensation.rounding import SWEEPS, Inputs, round_compensated
from qwen_serve.convert.errors import ConvertError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gguf import GGMLQuantizationType as Type
    from numpy.typing import NDArray

    from qwen_serve.convert.compensation.arrays import Array
    from qwen_serve.convert.compensation.packing import Bytes

Floats: TypeAlias = "NDArray[np.float32]"
Key: TypeAlias = tuple[str, int]
"""A weight and which of its matrices."""


class Worker:
    """Arguments and results are numpy's; in between arrays are where `bring` moves them."""

    def __init__(self, bring: Callable[[Floats], Array]) -> None:
        self._bring = bring
        self._sums: dict[Key, Array] = {}
        self._inputs: Inputs | None = None

    def add(self, key: Key, rows: Floats) -> None:
        """Adds inputs [n, width] of a matrix to its Gram matrix."""
        here = self._bring(rows)
        product = here.T @ here
        if key in self._sums:
            self._sums[key] += product
        else:
            self._sums[key] = product

    def prepare(self, key: Key, width: int) -> None:
        """Makes a Gram matrix, which is then discarded, that of the following calls. Without inputs it is
        the identity: no error is carried on.

        Raises:
            ConvertError: it is not finite.
        """
        gram = self._sums.pop(key, None)
        if gram is None:
            gram = self._bring(np.zeros((width, width), np.float32))
        if not bool(namespace(gram).isfinite(gram).all()):
            raise ConvertError(f"the inputs of {key[0]} are not finite; is the checkpoint intact?")
        self._inputs = None  # frees the last before there is another
        self._inputs = Inputs(gram)

    def drop(self, name: str) -> None:
        """Discards the Gram matrices of a weight."""
        self._sums = {key: gram for key, gram in self._sums.items() if key[0] != name}

    def round(self, kind: Type, values: Floats, sweeps: int = SWEEPS) -> tuple[Bytes, Floats]:
        """Rows [rows, width] as bytes of the type, and the values of these."""
        blocks = round_compensated(self._here(values), self._ready, GRIDS[kind], sweeps=sweeps)
        return pack(kind, blocks), on_host(blocks.values().T, np.float32)

    def loss(self, values: Floats, rounded: Floats) -> float:
        """trace(E G E') of the rounding error E."""
        off = self._here(rounded) - self._here(values)
        return float((off * (self._ready.gram @ off)).sum())

    def _here(self, rows: Floats) -> Array:
        return transposed(self._bring(rows))

    @property
    def _ready(self) -> Inputs:
        assert self._inputs is not None, "a Gram matrix is prepared first"
        return self._inputs


class _Remote:
    """A `Worker`'s methods, called in another process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                self._connection.send((name, arguments))
                result = self._connection.recv()
            except (EOFError, OSError):
                raise ConvertError(
                    "the process that rounds with torch has ended; its message is above, or the kernel's log "
                    "has it if memory was short. Without a GPU (--n-gpu-layers 0) numpy rounds"
                ) from None
            if isinstance(result, BaseException):
                raise result
            return result

        return call


@contextmanager
def working(device: str | None) -> Iterator[Worker]:
    """A worker on a torch device, or, if that is None or there is no torch or no such device, with numpy."""
    if device is None or find_spec("torch") is None:
        yield Worker(np.array)
        return
    ours, theirs = Pipe()
    command = [sys.executable, "-m", __name__, str(theirs.fileno()), device]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]), ours:
        theirs.close()
        remote = cast("Worker", _Remote(ours))
        yield remote if ours.recv() else Worker(np.array)


def serve(connection: Connection, worker: Worker) -> None:
    """Answers calls until the other side is gone."""
    with suppress(EOFError, OSError):
        while True:
            name, arguments = connection.recv()
            try:
                result = getattr(worker, name)(*arguments)
            except Exception as error:
                result = error
            connection.send(result)


def main() -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other side gets it, too, and closes the connection
    connection, device = Connection(int(sys.argv[1])), sys.argv[2]
    connection.send(device != "cuda" or torch.cuda.is_available())
    serve(connection, Worker(lambda array: torch.as_tensor(array, device=device)))


if __name__ == "__main__":
    main()
