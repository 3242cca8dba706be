"""Views of llama.cpp's memory."""

import ctypes

import numpy as np
import numpy.typing as npt


def matrix(address: int, rows: int, width: int) -> npt.NDArray[np.float32]:
    """A view of llama.cpp's memory with 4 bytes a number: shape [rows, width]."""
    memory = (ctypes.c_char * (4 * rows * width)).from_address(address)
    return np.frombuffer(memoryview(memory), np.float32).reshape(rows, width)
