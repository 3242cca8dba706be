"""Logits of one libllama over a script of mixed batches, to compare two builds.

    LLAMA_CPP_LIB_PATH=/build/bin python tests/patches/rows.py --model nano-F32.gguf --out rows.npz

The script is drawn from a seed and never looks at a logit, so that two builds run the same one: prompts of
unequal length, steps of several sequences in changing order, prefill beside them, checkpoints by seq_cp and
restores, seq_rm, ways back to snapshots. It speaks to the C API itself: nothing of the server may hide a
difference.
"""

import argparse
import ctypes
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np
from numpy.typing import NDArray

N_SEQ = 12
"""Sequences that generate; as many more hold checkpoints."""

SHARED = 0x80000000
"""LLAMA_RS_SEQ_SHARED of src/llama-ext.h."""


RUNS = (
    ("--f32 --actions 300", 1e-5),
    ("--f32 --streams --seed 2", 1e-5),
    ("--f32 --snapshots 2 --seed 5", 1e-5),
    ("--flash --seed 3", 2e-3),  # attention in F16: the noise of another batch shape
    ("--flash --streams --seed 4", 2e-3),
)
"""Options, and the largest difference between two builds, in standard deviations of the logits."""


class Engine:
    """A context, and which sequence holds how many tokens."""

    def __init__(
        self,
        model: Path,
        *,
        n_ctx: int,
        gpu: bool,
        flash: bool,
        unified: bool,
        f32: bool,
        snapshots: int,
        shared: bool,
    ) -> None:
        C.llama_backend_init()
        options = C.llama_model_default_params()
        options.n_gpu_layers = 999 if gpu else 0
        self.model = C.llama_load_model_from_file(str(model).encode(), options)
        params = C.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, 512, 128
        params.n_seq_max = 2 * N_SEQ
        params.n_rs_seq = snapshots | (SHARED if shared else 0)
        params.kv_unified = unified
        params.flash_attn_type = int(flash)
        params.n_threads = params.n_threads_batch = 2
        if f32:
            params.type_k = params.type_v = 0
        self.context = C.llama_new_context_with_model(self.model, params)
        if not self.context:
            raise SystemExit("no context")
        self.memory = C.llama_get_memory(self.context)
        self.n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(self.model))
        self.held = [0] * (2 * N_SEQ)
        self.rows: list[NDArray[np.float32]] = []

    def decode(self, tokens: dict[int, NDArray[np.int64]]) -> None:
        """One call: the tokens of each sequence, in the mapping's order; keeps the last row of each."""
        n = sum(map(len, tokens.values()))
        batch: Any = C.llama_batch_init(n, 0, 1)
        at = 0
        for sequence, ids in tokens.items():
            for index, token in enumerate(ids.tolist()):
                batch.token[at] = token
                batch.pos[at] = self.held[sequence] + index
                batch.n_seq_id[at] = 1
                batch.seq_id[at][0] = sequence
                batch.logits[at] = index == len(ids) - 1
                at += 1
            self.held[sequence] += len(ids)
        batch.n_tokens = n
        status = C.llama_decode(self.context, batch)
        if status:
            raise SystemExit(f"llama_decode: {status}")
        at = -1
        for ids in tokens.values():
            at += len(ids)
            row = ctypes.cast(C.llama_get_logits_ith(self.context, at), ctypes.POINTER(ctypes.c_float))
            self.rows.append(np.ctypeslib.as_array(row, (self.n_vocab,)).copy())
        C.llama_batch_free(batch)

    def copy(self, source: int, target: int) -> None:
        """The target becomes the source."""
        self.remove(target)
        C.llama_memory_seq_cp(self.memory, source, target, -1, -1)
        self.held[target] = self.held[source]

    def rewind(self, sequence: int, n_tokens: int) -> None:
        """Take the last tokens back, of a sequence that was alone in the last call: to a snapshot."""
        self.held[sequence] -= n_tokens
        if not C.llama_memory_seq_rm(self.memory, sequence, self.held[sequence], -1):
            raise SystemExit(f"no way back by {n_tokens}")

    def remove(self, sequence: int) -> None:
        C.llama_memory_seq_rm(self.memory, sequence, -1, -1)
        self.held[sequence] = 0


def play(engine: Engine, seed: int, n_actions: int, n_ctx: int, snapshots: int) -> None:
    """The script."""
    actions = ["prompt", "long", "step", "steps", "leave", "mixed", "verify", "save", "restore", "drop"]
    if snapshots:
        actions.append("rewind")
    draw = np.random.default_rng(seed)
    longest = n_ctx // (2 * N_SEQ) - 1

    def ids(n: int) -> NDArray[np.int64]:
        return draw.integers(0, min(engine.n_vocab, 1000), n)

    for _ in range(n_actions):
        action = draw.choice(actions)
        for sequence, held in enumerate(engine.held):
            if held > longest - 40:
                engine.remove(sequence)
        running = [s for s in range(N_SEQ) if engine.held[s]]
        resting = [s for s in range(N_SEQ) if not engine.held[s]]
        draw.shuffle(running)
        draw.shuffle(resting)
        some = running[: int(draw.integers(1, N_SEQ + 1))]
        if action == "prompt" and resting:
            engine.decode({s: ids(int(draw.integers(1, 30))) for s in resting[: int(draw.integers(1, 4))]})
        elif action == "long" and resting:  # a pass of more than 64 tokens, which steps surround
            engine.decode({resting[0]: ids(int(draw.integers(65, 120)))})
        elif action == "step" and some:
            engine.decode({s: ids(1) for s in some})
        elif action == "steps" and some:
            for _ in range(6):
                engine.decode({s: ids(1) for s in some})
                if any(engine.held[s] > longest - 20 for s in some):
                    break
        elif action == "leave":  # a step of all, then some without one after the other
            if resting:
                engine.decode({s: ids(3) for s in resting})
            for n_left in range(4):
                engine.decode({s: ids(1) for s in [*running, *resting][n_left:]})
        elif action == "mixed" and some and resting:
            engine.decode({**{s: ids(1) for s in some}, resting[0]: ids(int(draw.integers(2, 30)))})
        elif action == "verify" and some:
            engine.decode({s: ids(4) for s in some})
        elif action == "rewind" and some:
            sequence = some[0]
            for n_tokens in (1, 2, int(draw.integers(3, 7))):
                engine.decode({sequence: ids(n_tokens)})
                if back := min(n_tokens - 1, int(draw.integers(0, snapshots + 1))):
                    engine.rewind(sequence, back)
                    engine.decode({sequence: ids(1)})
        elif action == "save" and running:
            for sequence in running[:3]:
                engine.copy(sequence, N_SEQ + int(draw.integers(0, N_SEQ)))
        elif action == "restore":
            saved = [s for s in range(N_SEQ, 2 * N_SEQ) if engine.held[s]]
            for sequence in draw.permutation(saved)[:3]:
                engine.copy(int(sequence), int(draw.integers(0, N_SEQ)))
        elif action == "drop" and some:
            engine.remove(some[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--actions", type=int, default=150)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--flash", action="store_true")
    parser.add_argument(
        "--streams", action="store_true", help="a KV stream for each sequence, not one for all"
    )
    parser.add_argument("--f32", action="store_true", help="the KV cache in F32")
    parser.add_argument("--snapshots", type=int, default=0, help="of each recurrent state, to go back to")
    parser.add_argument("--shared", action="store_true", help="snapshots of one sequence, not of each")
    options = parser.parse_args()
    n_ctx = 2 * N_SEQ * 256
    engine = Engine(
        options.model,
        n_ctx=n_ctx,
        gpu=options.gpu,
        flash=options.flash,
        unified=not options.streams,
        f32=options.f32,
        snapshots=options.snapshots,
        shared=options.shared,
    )
    play(engine, options.seed, options.actions, n_ctx, options.snapshots)
    rows = np.stack(engine.rows)
    with options.out.open("wb") as file:
        np.savez(file, rows=rows, reused=C.llama_perf_context(engine.context).n_reused)
    print(f"{len(rows)} rows, deviation {rows.std():.3f}, {hash(rows.tobytes()) & 0xFFFFFFFF:08x}")


if __name__ == "__main__":
    main()
