"""The parts that are cut from a model."""

from dataclasses import dataclass

from qwen_serve.convert.prune import label
from qwen_serve.convert.prune_vocab import label as vocab_label


@dataclass(frozen=True)
class Pruning:
    """Parts that a base leaves out: some trunk layers, and the regular tokens after the first ones (None:
    keep all)."""

    layers: tuple[int, ...] = ()
    tokens: int | None = None

    @property
    def label(self) -> str:
        return "-".join(filter(None, (vocab_label(self.tokens), label(self.layers))))


WHOLE = Pruning()
