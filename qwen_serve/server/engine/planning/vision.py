"""Sizes of a vision tower, from the metadata and the tensors of its file."""

from dataclasses import dataclass
from typing import Self

from qwen_serve.llamacpp.errors import ModelLoadError
from qwen_serve.llamacpp.gguf import Header, Metadata
from qwen_serve.llamacpp.vision import token_side
from qwen_serve.server.engine.model_file import ModelFile
from qwen_serve.server.engine.settings import EngineSettings

ARCHITECTURE, PROJECTOR = "clip", "qwen3vl_merger"
MAX_WIDTH = 1 << 16
MOST_TOKENS = 4096
"""Default maximum tokens of a picture: llama.cpp's own bound (clip.cpp, `set_limit_image_tokens`)."""
PATCHES = 4
"""Patches that make a token."""
FLASH_HEADS = (40, 64, 72, 80, 96, 112, 128, 256)
"""Head sizes for which a GPU has flash attention (ggml-cuda's ggml_cuda_get_best_fattn_kernel)."""
IN_FLIGHT, IN_FLIGHT_SHARE = 2 * 1024**3, 8
"""Maximum bytes of rows that requests hold, in addition to the cached ones; the host's free memory divided by
IN_FLIGHT_SHARE if that is less. 2 GiB are 200 pictures of 1,024 tokens for a 4B."""
WITHOUT = "--mmproj off serves without pictures"


@dataclass(frozen=True)
class VisionSpec:
    """A tower: bytes of weights, and of compute buffers for the largest picture."""

    file: ModelFile
    weights: int
    compute: int
    products: int
    """Bytes of a layer's attention scores, between all patches, on a GPU without flash attention for its head
    size; 0 with it."""
    side: int
    """Pixels along either side of the square that becomes a token."""

    @classmethod
    def from_header(cls, header: Header, n_embd: int, settings: EngineSettings) -> Self:
        """Raises ModelLoadError for another kind of file or another model's tower."""
        if (kind := header.metadata.get("general.architecture")) != ARCHITECTURE:
            raise ModelLoadError(
                f"{header.name} is of architecture {kind!r}; want an mmproj, which is {ARCHITECTURE!r} "
                f"({WITHOUT})"
            )
        if (projector := header.metadata.get("clip.projector_type")) != PROJECTOR:
            raise ModelLoadError(
                f"{header.name} has the projector {projector!r}; Qwen3.5's is {PROJECTOR!r} ({WITHOUT})"
            )
        metadata = Metadata(header, "clip.vision")
        if (width := metadata.integer("projection_dim", least=1)) != n_embd:
            raise ModelLoadError(
                f"{header.name} is another model's: its rows have {width} elements, the model's {n_embd}; "
                f"name this model's with --mmproj ({WITHOUT})"
            )
        wide = metadata.integer("embedding_length", least=1, most=MAX_WIDTH)
        ffn = metadata.integer("feed_forward_length", least=1, most=MAX_WIDTH)
        heads = metadata.integer("attention.head_count", least=1, most=wide)
        patches = PATCHES * (settings.image_max_tokens or MOST_TOKENS)
        return cls(
            file=ModelFile.of(header.path, header.status),
            weights=sum(tensor.n_bytes for tensor in header.tensors.values()),
            # one layer's input, and its queries, keys and values or the inner values of its FFN
            compute=4 * patches * (2 * wide + max(4 * wide, 2 * ffn)),
            products=0 if wide // heads in FLASH_HEADS else 4 * heads * patches**2,
            side=token_side(header),
        )
