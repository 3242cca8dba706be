"""llama.cpp's own greedy samplers in the graph choose what is best."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from server.engine.llama import Context, ContextOptions, Model
from server.engine.llama.chains import GreedyChains, detach
from server.engine.warmup import decode

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = ContextOptions(
    n_ctx=1024,
    n_seq=4,
    n_batch=64,
    n_ubatch=64,
    n_outputs=4,
    threads=1,
    threads_batch=1,
    flash_attn="off",
    type_k="f32",
    type_v="f32",
)


def test_they_choose_the_best(nano_f32: Path) -> None:
    model = Model(nano_f32, n_gpu_layers=0)
    plain, sampled = Context(model, OPTIONS), Context(model, OPTIONS)
    chains = GreedyChains(sampled, 4)
    try:
        decode(plain, 4, take=False)
        best = plain.logits(4).argmax(axis=1).tolist()
        decode(sampled, 4, take=False)
        assert len(set(best)) > 1
        assert chains.tokens(range(4)) == best
    finally:
        plain.close()
        sampled.close()
        chains.close()
        chains.close()
        model.close()


def test_without_one_the_rows_of_all_come_back(nano_f32: Path) -> None:
    model = Model(nano_f32, n_gpu_layers=0)
    plain, read_out = Context(model, OPTIONS), Context(model, replace(OPTIONS, n_readouts=4))
    try:
        decode(plain, 4, take=False)
        best = plain.logits(4).argmax(axis=1).tolist()
        detach(read_out, 3)
        decode(read_out, 4, take=False)
        assert read_out.logits(4).argmax(axis=1).tolist() == best
    finally:
        plain.close()
        read_out.close()
        model.close()
