"""Encodes pictures to rows that a text model reads in place of tokens, with an mmproj and llama.cpp's
libmtmd."""

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self
from weakref import finalize

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np
import numpy.typing as npt
from PIL import Image

from .abi_checks import VISION_PARAMETERS, missing_fields
from .context import PLANES
from .errors import LlamaError, ModelLoadError
from .gguf import Header, Metadata, read_header
from .log import _route_log, reason, set_up, tapped_log
from .model import Model


@cache
def _library() -> Any:
    """llama_cpp.mtmd_cpp, which loads libmtmd. Raises LlamaError if llama.cpp was built without it."""
    if folder := os.environ.get("LLAMA_CPP_LIB_PATH"):  # mtmd_cpp reads another name; two builds would crash
        os.environ.setdefault("MTMD_CPP_LIB", folder)
    try:
        from llama_cpp import mtmd_cpp
    except (RuntimeError, OSError) as error:
        raise LlamaError(
            f"llama.cpp was built without libmtmd, which reads pictures ({error}); "
            "`qwen-serve setup` builds both"
        ) from None
    if different := missing_fields(mtmd_cpp, VISION_PARAMETERS):
        raise LlamaError(f"llama-cpp-python's libmtmd is not as this server expects it: {different}")
    mtmd_cpp.mtmd_log_set(_route_log, ctypes.c_void_p(0))
    return mtmd_cpp


def has_vision() -> bool:
    """Whether llama.cpp was built with libmtmd."""
    try:
        _library()
    except LlamaError:
        return False
    return True


@dataclass(frozen=True, eq=False)
class ImageRows:
    """A picture ready to be encoded (resized and normalized), or only measured."""

    n_rows: int
    """Rows of its encoding: its tokens."""
    n_pos: int
    """Positions that it takes: following tokens are this much after its first row."""
    positions: npt.NDArray[np.int32]
    """[PLANES, n_rows], for a picture at position 0. Its real position is added to all but the last plane."""
    _chunk: Any


def token_side(header: Header) -> int:
    """Pixels along either side of the square that becomes a token: two patches (clip.cpp's merger).

    Raises ModelLoadError.
    """
    return 2 * Metadata(header, "clip.vision").integer("patch_size", least=1, most=1024)


class VisionTower:
    """An mmproj's weights, for one text model; a context manager.

    `prepare` may be called from any thread, `encode` from one at a time. A picture has `min_tokens` to
    `max_tokens` rows: smaller and larger ones are resized; 0 is llama.cpp's own bound. `use_gpu` False keeps
    the weights on the host. Raises ModelLoadError, and LlamaError if libmtmd is missing.
    """

    def __init__(
        self,
        path: Path,
        model: Model,
        *,
        threads: int,
        use_gpu: bool = True,
        flash_attn: bool = True,
        min_tokens: int = 0,
        max_tokens: int = 0,
        warm_up: bool = True,
    ) -> None:
        self.path, self._handle = path, None
        set_up()
        self._mtmd = mtmd = _library()
        params = mtmd.mtmd_context_params_default()
        params.use_gpu, params.print_timings, params.n_threads = use_gpu, False, threads
        params.flash_attn_type = (
            C.LLAMA_FLASH_ATTN_TYPE_AUTO if flash_attn else C.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.warmup = warm_up
        if min_tokens:
            params.image_min_tokens = min_tokens
        if max_tokens:
            params.image_max_tokens = max_tokens
        with tapped_log() as lines:
            self._handle = mtmd.mtmd_init_from_file(os.fsencode(path), model._handle, params)
        if not self._handle:
            raise ModelLoadError(f"llama.cpp could not load {path}: {reason(lines)}")
        if not mtmd.mtmd_support_vision(self._handle):
            self.close()
            raise ModelLoadError(f"{path} has no vision tower")
        self.n_embd = int(C.llama_model_n_embd_inp(model._handle))
        self._side = token_side(read_header(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self, rgb: npt.NDArray[np.uint8]) -> ImageRows:
        """Resizes (bicubic) and normalizes a picture of shape [height, width, 3]. Raises LlamaError."""
        if rgb.ndim != 3 or rgb.shape[2] != 3 or rgb.dtype != np.uint8 or not rgb.size:
            raise ValueError(f"want bytes of shape [height, width, 3], got {rgb.dtype} of {list(rgb.shape)}")
        rgb = self._whole(rgb)
        height, width, _ = rgb.shape
        return self._prepare(width, height, np.ascontiguousarray(rgb))

    def _whole(self, rgb: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """A picture stretched to whole tokens, as transformers does it (Qwen2VLImageProcessor). libmtmd would
        keep the ratio of its sides and fill the rest with black."""
        height, width, _ = rgb.shape
        _, rows, columns, _ = self.measure(width, height).positions.max(1) + 1
        size = int(columns) * self._side, int(rows) * self._side
        if size == (width, height):
            return rgb
        return np.asarray(Image.fromarray(rgb).resize(size, Image.Resampling.BICUBIC))

    def measure(self, width: int, height: int) -> ImageRows:
        """The rows of a picture of that size, without encoding it. Raises LlamaError."""
        return self._prepare(width, height, None)

    def _prepare(self, width: int, height: int, rgb: npt.NDArray[np.uint8] | None) -> ImageRows:
        mtmd = self._mtmd
        data = rgb.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)) if rgb is not None else None
        bitmap = mtmd.mtmd_bitmap_init(width, height, data)  # copies the pixels
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            part = mtmd.mtmd_input_part(text=None, bitmap=bitmap)
            parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
            status = mtmd.mtmd_tokenize_from_parts(self._handle, chunks, parts, 1, False)
            if status != 0:
                raise LlamaError(f"mtmd_tokenize_from_parts returned {status} for {width} x {height} pixels")
            found = [
                chunk
                for index in range(mtmd.mtmd_input_chunks_size(chunks))
                if mtmd.mtmd_input_chunk_get_type(chunk := mtmd.mtmd_input_chunks_get(chunks, index))
                == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE
            ]
            if len(found) != 1:
                raise LlamaError(f"mtmd_tokenize_from_parts made {len(found)} pictures of one")
            rows = self._rows(found[0])
        except BaseException:
            mtmd.mtmd_input_chunks_free(chunks)
            raise
        finally:
            mtmd.mtmd_bitmap_free(bitmap)
        finalize(rows, mtmd.mtmd_input_chunks_free, chunks)  # a chunk's copy would copy the pixels, too
        return rows

    def _rows(self, chunk: int) -> ImageRows:
        mtmd = self._mtmd
        n_rows = int(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
        places = (mtmd.mtmd_decoder_pos * n_rows)()
        mtmd.mtmd_helper_image_get_decoder_pos(mtmd.mtmd_input_chunk_get_tokens_image(chunk), 0, places)
        t, x, y, z = np.frombuffer(places, np.int32).reshape(n_rows, PLANES).T
        return ImageRows(n_rows, int(mtmd.mtmd_input_chunk_get_n_pos(chunk)), np.stack([t, y, x, z]), chunk)

    def encode(self, rows: ImageRows) -> npt.NDArray[np.float32]:
        """The rows that the text model reads, shape [n_rows, n_embd], in memory of their own.

        Raises: LlamaError: the picture was only measured, or llama.cpp failed and has logged why.
        """
        if (status := self._mtmd.mtmd_encode_chunk(self._handle, rows._chunk)) != 0:
            raise LlamaError(f"mtmd_encode_chunk returned {status} for a picture of {rows.n_rows} rows")
        output = self._mtmd.mtmd_get_output_embd(self._handle)
        return np.ctypeslib.as_array(output, (rows.n_rows, self.n_embd)).copy()

    def close(self) -> None:
        """Free the weights; call before freeing the text model's. Idempotent."""
        if self._handle:
            self._mtmd.mtmd_free(self._handle)
            self._handle = None
