"""Finds the matrices of a block's routed experts; llama.cpp requires one tensor for each role.

Two layouts are in use, and one checkpoint may have both, one in the trunk and the other in the MTP block:

- fused: `mlp.experts.gate_up_proj` [experts, 2 * ffn, hidden] and `mlp.experts.down_proj`
  [experts, hidden, ffn]; these names may end in `.weight`.
- per expert: `mlp.experts.N.gate_proj.weight` and `.up_proj.weight` [ffn, hidden], `.down_proj.weight`
  [hidden, ffn].

Both are converted to [experts, rows, columns].
"""

from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.safetensors import Joined, Piece, StoredTensor, TensorSource

HALVES = {"gate_proj": 0, "up_proj": 1}


def find_experts(checkpoint: Checkpoint, name: str) -> tuple[TensorSource, tuple[str, ...]]:
    """The tensor [experts, rows, columns] of one role, and the names of its source tensors.

    Args:
        name: such as `model.layers.0.mlp.experts.gate_proj`.

    Raises: CheckpointError: part of it is missing, or single experts differ in shape or dtype.
    """
    tensors = checkpoint.tensors
    prefix, _, role = name.rpartition(".")
    whole = f"{prefix}.gate_up_proj" if role in HALVES else name
    for fused in (whole, f"{whole}.weight"):
        if (stored := tensors.get(fused)) is not None:
            return (_half(stored, HALVES[role], name) if role in HALVES else stored), (fused,)
    assert checkpoint.config.experts is not None, "only models of experts have such names"
    names = tuple(f"{prefix}.{i}.{role}.weight" for i in range(checkpoint.config.experts.count))
    if missing := [each for each in names if each not in tensors]:
        what = whole if len(missing) == len(names) else missing[0]
        raise CheckpointError(f"{checkpoint.folder}: tensor {what} is missing")
    return _stack([tensors[each] for each in names], name), names


def _half(stored: StoredTensor, half: int, name: str) -> Joined:
    """Gate or up projection of every expert in a fused tensor: the first or the second half of its rows."""
    if len(stored.shape) != 3 or stored.shape[1] % 2:
        raise CheckpointError(
            f"{stored.path}: tensor {stored.name} has shape {list(stored.shape)}; "
            "want [experts, 2 * ffn, hidden]"
        )
    experts, rows, columns = stored.shape
    size = rows // 2 * columns
    pieces = [Piece(stored, (2 * expert + half) * size, size) for expert in range(experts)]
    return Joined(name, (experts, rows // 2, columns), pieces)


def _stack(stored: list[StoredTensor], name: str) -> Joined:
    first = stored[0]
    for each in stored:
        if (each.shape, each.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{each.path}: tensor {each.name} is {each.dtype} of shape {list(each.shape)}, "
                f"{first.name} is {first.dtype} of shape {list(first.shape)}"
            )
    pieces = [Piece(each, 0, each.n_elements) for each in stored]
    return Joined(name, (len(stored), *first.shape), pieces)
