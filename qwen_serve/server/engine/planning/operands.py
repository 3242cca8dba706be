"""Whether verified tokens can leave operands, in place of snapshots of states."""

from qwen_serve.llamacpp import HAS_OPERANDS
from qwen_serve.llamacpp.errors import ModelLoadError
from qwen_serve.server.engine.settings import EngineSettings

from .sequence_ids import SequenceIds
from .spec import ModelSpec


def with_operands(settings: EngineSettings, spec: ModelSpec) -> EngineSettings:
    """The settings with operands in place of snapshots, or with neither if nothing is drafted. Raises
    ModelLoadError if there can be none."""
    if settings.snapshots > 0:
        raise ModelLoadError("operands and snapshots are set; one of them takes rejected tokens back")
    if settings.deterministic:
        raise ModelLoadError("operands are set, but with deterministic each sequence is computed by itself")
    if not HAS_OPERANDS:
        raise ModelLoadError("operands are set, but this llama.cpp was built without operand-verification")
    if not spec.state or not SequenceIds.of(settings).drafting:
        return settings.replace(snapshots=0, operands=0)
    most = min(settings.ubatch_size, settings.batch_size) - 2
    if settings.operands > most:
        limits = f"ubatch_size {settings.ubatch_size} and batch_size {settings.batch_size}"
        raise ModelLoadError(f"operands is {settings.operands}; with {limits} it can be at most {most}")
    return settings.replace(snapshots=0)
