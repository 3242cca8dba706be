"""What a vision tower takes, from the metadata and the tensors of its file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from qwen_serve.llamacpp.errors import ModelLoadError
from qwen_serve.llamacpp.gguf import Metadata
from qwen_serve.server.engine.model_file import ModelFile

if TYPE_CHECKING:
    from qwen_serve.llamacpp.gguf import Header
    from qwen_serve.server.engine.settings import EngineSettings

ARCHITECTURE, PROJECTOR = "clip", "qwen3vl_merger"
MAX_WIDTH = 1 << 16
MOST_TOKENS = 4096
"""Of a picture, where nobody says: llama.cpp's own bound (clip.cpp, `set_limit_image_tokens`)."""
PATCHES = 4
"""Of a token."""


@dataclass(frozen=True)
class VisionSpec:
    """A tower: bytes of weights, and of what it computes with for the largest picture."""

    file: ModelFile
    weights: int
    compute: int
    side: int
    """Pixels along either side of what becomes a token."""

    @classmethod
    def from_header(cls, header: Header, n_embd: int, settings: EngineSettings) -> Self:
        """Raises ModelLoadError for another kind of file, or where it is another model's tower."""
        if (kind := header.metadata.get("general.architecture")) != ARCHITECTURE:
            raise ModelLoadError(
                f"{header.name} is of architecture {kind!r}; want an mmproj, which is {ARCHITECTURE!r}"
            )
        if (projector := header.metadata.get("clip.projector_type")) != PROJECTOR:
            raise ModelLoadError(f"{header.name} has the projector {projector!r}; Qwen3.5's is {PROJECTOR!r}")
        metadata = Metadata(header, "clip.vision")
        if (width := metadata.integer("projection_dim", least=1)) != n_embd:
            raise ModelLoadError(
                f"{header.name} is another model's: its rows have {width} elements, the model's {n_embd}"
            )
        wide = metadata.integer("embedding_length", least=1, most=MAX_WIDTH)
        ffn = metadata.integer("feed_forward_length", least=1, most=MAX_WIDTH)
        patches = PATCHES * (settings.image_max_tokens or MOST_TOKENS)
        return cls(
            file=ModelFile.of(header.path, header.status),
            weights=sum(tensor.n_bytes for tensor in header.tensors.values()),
            # of a layer: what comes in, queries, keys and values, or the FFN's inside
            compute=4 * patches * (2 * wide + max(4 * wide, 2 * ffn)),
            side=2 * metadata.integer("patch_size", least=1, most=1024),
        )
