"""Options of a context with reproducible results: F32, one thread, no flash attention."""

from typing import Any

from qwen_serve.llamacpp import ContextOptions


def exact_options(*, n_ctx: int, n_batch: int, n_outputs: int, n_seq: int = 1, **more: Any) -> ContextOptions:
    """`more` are other fields of ContextOptions."""
    return ContextOptions(
        n_ctx=n_ctx,
        n_seq=n_seq,
        n_batch=n_batch,
        n_ubatch=n_batch,
        n_outputs=n_outputs,
        threads=1,
        threads_batch=1,
        flash_attn="off",
        type_k="f32",
        type_v="f32",
        **more,
    )
