"""Decodes batches with a KV cache, recurrent states and compute buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp_ext

from . import abi_checks, ggml, layers, operands
from .adapter import LoraAdapter
from .context_options import ContextOptions
from .devices import CACHE_TYPES
from .errors import LlamaError, NoMemorySlot
from .host_sampler import HostRowSteps
from .log import reason, tapped_log
from .memory import matrix
from .model import Model
from .patches import BATCH_INVARIANT, RAGGED_PASSES, brings
from .recurrent_states import n_rs_seq
from .row_sampler import HAS_ROW_SAMPLER, Place
from .row_steps import RowSteps
from .snapshots import Snapshots

ON_DEVICE = C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY | C.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE
"""Flags for the part of a state that is not keys or values, copied within the device."""

HAS_BATCH_INVARIANCE = brings(BATCH_INVARIANT, "llama_set_batch_invariant")
"""Whether this build has batch-invariant kernels, whose rows do not depend on how many are computed."""

if HAS_RAGGED_PASSES := brings(RAGGED_PASSES, "llama_ragged_passes"):
    _ragged_passes = ggml.declare("llama_ragged_passes", ctypes.c_bool, ctypes.c_void_p)

BATCH_INVARIANT_TOKENS = 64
"""Most tokens of a batch-invariant pass (`LLAMA_BATCH_INVARIANT_MAX`)."""

BATCH_INVARIANT_SNAPSHOTS = 15
"""Most snapshots that leave the bits of a batch-invariant context unchanged. The recurrent layers always
compute the last tokens of a prompt's pass one by one: this many and one more."""

FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}

PLANES = 4
"""Axes of a picture's position: time, row, column, and one that Qwen3.5 leaves at 0."""


class Context:
    """Decodes batches with a KV cache, recurrent states and compute buffers.

    Fill `tokens`, `positions`, `sequences` and `outputs` (1 where logits are wanted) from the start, call
    `decode(n)`, then `rows(...)` or, without device samplers, `logits(n)`. One thread only. Raises LlamaError
    if llama.cpp refuses the options.
    """

    _type = C.LLAMA_CONTEXT_TYPE_DEFAULT

    def __init__(self, model: Model, options: ContextOptions, *, other: Context | None = None) -> None:
        """`other`: the context whose model has the tensors that this model lacks."""
        self._handle: Any = None
        params = C.llama_context_default_params()
        if other is not None:
            params.ctx_other = other._handle
        params.ctx_type = self._type
        params.n_ctx = options.n_ctx
        params.n_seq_max = options.n_seq
        params.n_batch = options.n_batch
        params.n_ubatch = options.n_ubatch
        params.n_outputs_max = options.n_outputs
        params.n_rs_seq = n_rs_seq(options)
        params.n_threads = options.threads
        params.n_threads_batch = options.threads_batch
        params.flash_attn_type = FLASH_ATTENTION[options.flash_attn]
        params.type_k = CACHE_TYPES[options.type_k]
        params.type_v = CACHE_TYPES[options.type_v]
        params.kv_unified = options.unified
        params.offload_kqv, params.op_offload = True, options.op_offload
        if options.eval_callback is not None:
            params.cb_eval = options.eval_callback
        params.no_perf = True
        with tapped_log() as lines:
            self._handle = C.llama_init_from_model(model._handle, params)
        self.log = lines
        if not self._handle:
            self.close()
            raise LlamaError(reason(lines))
        if options.batch_invariant and HAS_BATCH_INVARIANCE:
            invariant = ggml.declare("llama_set_batch_invariant", None, ctypes.c_void_p, ctypes.c_uint32)
            invariant(self._handle, BATCH_INVARIANT_SNAPSHOTS + 1)
        self._memory = C.llama_get_memory(self._handle)
        self._n_vocab, self._n_embd = model.n_vocab, model.n_embd
        self._n_outputs, self._n_seq = options.n_outputs, options.n_seq
        self._n_reserved = 0
        """Rows of logits that llama.cpp reserved in the last batch; hidden rows follow them."""
        self._hidden_found = False  # at the expected place
        self.n_ctx = int(C.llama_n_ctx(self._handle))
        self.unified = options.unified
        self.n_ctx_seq = int(C.llama_n_ctx_seq(self._handle))
        """Most tokens of one sequence."""
        self._uncopied: set[int] = set()
        self._copied_from: set[int] = set()
        """Targets of copies that llama.cpp makes in the next decode (ids with cells of their own)."""
        self.n_batch = int(C.llama_n_batch(self._handle))
        self.n_ubatch = int(C.llama_n_ubatch(self._handle))
        self.ragged_passes = bool(HAS_RAGGED_PASSES and _ragged_passes(self._handle))
        """Whether a pass takes a batch's tokens in its order, however many each sequence has; not where each
        has cells of its own."""
        self.n_operands = operands.n_operands(self._handle)
        """The longest verification, of any sequence, whose tokens `remove` can take back."""
        self.operand_sequences = options.operand_sequences
        """Most sequences for which it can at the same time."""
        self.n_snapshots = int(C.llama_n_rs_seq(self._handle))
        """0 if the model keeps none."""
        self._snapshots = Snapshots(self.n_snapshots, self.n_ubatch)
        self.ring: layers.Ring | None = None
        """The ring for the rows of `keep_layers`; None if they are copied to the host."""
        self._ring_rows = np.zeros(0, np.int32)
        """Ring rows of the last batch that filled the ring, in the batch's order."""
        self._fills_ring = False
        self._on_device: dict[int, npt.NDArray[np.uint8]] = {}
        """llama.cpp's host-side data about states in its device buffers, by sequence."""
        n = self.n_batch
        self.tokens: npt.NDArray[np.int32] = np.zeros(n, np.int32)
        self.positions: npt.NDArray[np.int32] = np.zeros(n, np.int32)
        self.sequences: npt.NDArray[np.int32] = np.zeros(n, np.int32)
        self.outputs: npt.NDArray[np.int8] = np.zeros(n, np.int8)
        self._counts = np.ones(n, np.int32)
        self._pointers = self.sequences.ctypes.data + 4 * np.arange(n, dtype=np.uintp)
        self._batch = C.llama_batch(
            n_tokens=0,
            token=self.tokens.ctypes.data_as(ctypes.POINTER(C.llama_token)),
            embd=None,
            pos=self.positions.ctypes.data_as(ctypes.POINTER(C.llama_pos)),
            n_seq_id=self._counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._pointers.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(C.llama_seq_id))),
            logits=self.outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        self._place, self._ahead = options.row_sampling, options.ahead
        self.row_steps: RowSteps | None = None
        """Samples rows; None if they are read by `logits`."""
        self.sample_rows()

    @cached_property
    def embeddings(self) -> npt.NDArray[np.float32]:
        """Input rows of a batch `of_pictures`, instead of `tokens`, with `planes` instead of `positions`."""
        return np.zeros((self.n_batch, self._n_embd), np.float32)

    @cached_property
    def planes(self) -> npt.NDArray[np.int32]:
        """[PLANES, n_batch]"""
        return np.zeros((PLANES, self.n_batch), np.int32)

    def _embedded(self, n_tokens: int) -> C.llama_batch:
        """The batch with rows in place of tokens; llama.cpp expects the planes one after another."""
        self._flat_planes = self.planes[:, :n_tokens].ravel()
        batch = C.llama_batch.from_buffer_copy(self._batch)
        batch.token = None
        batch.embd = self.embeddings.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        batch.pos = self._flat_planes.ctypes.data_as(ctypes.POINTER(C.llama_pos))
        return batch

    def decode(
        self,
        n_tokens: int,
        *,
        of_pictures: bool = False,
        next_rows: npt.NDArray[np.int32] | None = None,
        sampled_by: Context | None = None,
    ) -> None:
        """Run the first `n_tokens` of the batch. Positions must continue their sequences without a gap,
        except after a picture.

        With `of_pictures` the batch reads `embeddings`, a picture's rows. `next_rows`: for each token the row
        of the last pass from which it was sampled, or -1 if it is in `tokens`. Such a batch must be one pass
        (`in_one_pass`) and needs `runs_ahead`. `sampled_by`: the context that samples these rows, which
        `queues`, if it is another one.

        Raises NoMemorySlot if the cache is full, LlamaError if the computation failed; after the latter the
        sequences of the batch are in an unknown state.
        """
        if not 0 < n_tokens <= self.n_batch:
            raise LlamaError(f"a batch of {n_tokens} tokens; it must be 1 to {self.n_batch}")
        if (rows := int(np.count_nonzero(self.outputs[:n_tokens]))) > self._n_outputs:
            raise LlamaError(f"a batch with {rows} outputs; this context was made for {self._n_outputs}")
        sequences = self.sequences[:n_tokens]
        for sequence in self._snapshots.disturbed(sequences):
            self._materialize(sequence)
        if self.ring is not None and self._fills_ring:
            if of_pictures:  # drafters do not read their rows
                self._ring_rows = np.full(n_tokens, self.ring.n_rows - 1, np.int32)
            else:
                self._ring_rows = self.ring.rows(sequences, self.positions[:n_tokens])
            layers.set_ring_rows(self._handle, self._ring_rows)
        self._batch.n_tokens = n_tokens
        self._uncopied.clear()
        self._copied_from.clear()
        batch = self._embedded(n_tokens) if of_pictures else self._batch
        source = None if sampled_by is None else sampled_by.row_steps
        if next_rows is not None and not (self.row_steps and self.row_steps.read_next(next_rows, source)):
            raise LlamaError("the token embedding is not where tokens are chosen")
        status = C.llama_decode(self._handle, batch)
        if status == 1:
            raise NoMemorySlot(f"no room in the cache for a batch of {n_tokens} tokens")
        if status != 0:
            raise LlamaError(f"llama_decode returned {status} for a batch of {n_tokens} tokens")
        self._n_reserved = max(rows, self._n_seq)
        if self.n_snapshots:
            self._snapshots.decoded(sequences)

    def set_adapters(self, adapters: Sequence[tuple[LoraAdapter, float]]) -> None:
        """Apply these LoRA adapters, each at its scale, and no others to all further tokens. Tokens decoded
        before are unchanged. If the adapters change, the next decode plans its graphs again."""
        handles = (C.llama_adapter_lora_p_ctypes * len(adapters))(*(one._handle for one, _ in adapters))
        scales = (ctypes.c_float * len(adapters))(*(scale for _, scale in adapters))
        if status := C.llama_set_adapters_lora(self._handle, handles, len(adapters), scales):
            raise LlamaError(f"llama_set_adapters_lora returned {status}")

    @property
    def graphs_reused(self) -> int:
        """Number of passes so far that reused the graph of the pass before. With the patch steps-apart,
        passes of up to 64 tokens and longer passes each reuse the graph of the last pass of their kind."""
        return int(C.llama_perf_context(self._handle).n_reused)

    @contextmanager
    def whole_rows(self) -> Iterator[None]:
        """Within this, rows are copied to the host (`logits`)."""
        sampled = self.row_steps is not None
        self.sample_rows(on=False)
        try:
            yield
        finally:
            self.sample_rows(on=sampled)

    def wait(self) -> None:
        """Wait until the device has computed all decoded batches."""
        C.llama_synchronize(self._handle)

    def sample_rows(self, on: bool = True) -> None:
        """Sample rows where they are computed, as the options say, or copy them to the host (`logits`)."""
        steps = (RowSteps if HAS_ROW_SAMPLER else HostRowSteps)(self._handle, self._n_vocab)
        self.row_steps = steps if steps.switch(self._place if on else None) else None

    def sample_on_host(self) -> None:
        """Sample rows on the host from now on."""
        self._place = Place.HOST
        self.sample_rows()

    @property
    def samples_on_device(self) -> bool:
        return HAS_ROW_SAMPLER and self.row_steps is not None and self._place is Place.DEVICE

    @cached_property
    def runs_ahead(self) -> bool:
        """Whether `decode` may read its tokens where the last ones were sampled."""
        if not self._ahead or self.row_steps is None or not self.row_steps.outlive_batches:
            return False
        able = self.row_steps.read_next(np.zeros(1, np.int32))
        self.row_steps.read_next(np.zeros(0, np.int32))
        return able

    def in_one_pass(self, sequences: Sequence[int]) -> bool:
        """Whether one pass may have these sequences; with cells of their own only consecutive ids."""
        return self.unified or list(sequences) == [sequences[0] + i for i in range(len(sequences))]

    def keep_hidden(self, keep: bool = True) -> None:
        """Keep, or stop keeping, the hidden row of every decoded token, which the draft head reads. The next
        decode builds its graph again."""
        llama_cpp_ext.llama_set_embeddings_nextn(self._handle, keep, False)

    def hidden(self, n_tokens: int) -> npt.NDArray[np.float32]:
        """The hidden rows of the last batch, after the output norm: shape [n_tokens, n_embd]. Valid until the
        next decode, or as long as `keeps_rows` says. Waits for the device."""
        pointer = llama_cpp_ext.llama_get_embeddings_nextn(self._handle)
        if not self._hidden_found:
            abi_checks.require([abi_checks.hidden_rows(self._handle, 4 * self._n_reserved * self._n_vocab)])
            self._hidden_found = True
        return matrix(ctypes.addressof(pointer.contents), n_tokens, self._n_embd)

    def keeps_rows(self, place: int, n_tokens: int, n_rows: int) -> bool:
        """Whether a further batch of `n_tokens` tokens and `n_rows` rows of logits leaves the last batch's
        hidden rows on the host intact from index `place` on. A batch writes its rows over the first ones
        (`output_reserve` in llama-context.cpp). Builds without the row sampler then forget the order of
        rows that were not read yet, which with one pool of cells is the batch's."""
        intact = n_tokens <= place and max(n_rows, self._n_seq) == self._n_reserved
        return intact and (HAS_ROW_SAMPLER or self.unified)

    def open_ring(self, which: Sequence[int], ring: layers.Ring) -> None:
        """Keep the inputs of these layers on the device, if this llama.cpp and the device's memory allow
        it."""
        if layers.HAS_RING and ring.open(self._handle, which):
            self.ring = ring

    def keep_layers(self, which: Sequence[int], keep: bool = True) -> None:
        """`keep_hidden` for the inputs of layers, counted from 0. The next decode builds its graph again."""
        if self.ring is None:
            for layer in which:
                layers.set_embeddings_layer_inp(self._handle, layer, keep)
        elif self._fills_ring and not keep:
            layers.set_ring_rows(self._handle, np.zeros(0, np.int32))
        self._fills_ring = keep and self.ring is not None

    def layer_inputs(
        self, which: Sequence[int], batch_indices: Sequence[int]
    ) -> npt.NDArray[np.float32] | npt.NDArray[np.int32]:
        """A copy of the layers' inputs at `batch_indices` of the last batch, in order, side by side: shape
        [n, len(which) * n_embd]. The layers must have been kept. Waits for the device; available as long as
        `keeps_rows` says. With a ring it returns places in the ring, shape [n, 1], without waiting, valid
        until the next decode."""
        if self.ring is not None:
            return self._ring_rows[list(batch_indices), None]
        self.wait()
        first, last = batch_indices[0], batch_indices[-1]
        n, n_tokens = self._n_embd, last + 1
        together = last - first == len(batch_indices) - 1
        found = np.empty((len(batch_indices), len(which) * n), np.float32)
        for index, layer in enumerate(which):
            rows = matrix(layers.get_embeddings_layer_inp(self._handle, layer), n_tokens, n)
            found[:, index * n : (index + 1) * n] = rows[first:] if together else rows[batch_indices]
        return found

    def logits(self, rows: int) -> npt.NDArray[np.float32]:
        """Logits of the last batch's outputs, in order: shape [rows, n_vocab], valid until the next decode.

        Waits for the device. The view is writable; nothing reads it after the caller.
        """
        pointer = C.llama_get_logits(self._handle)
        return matrix(ctypes.addressof(pointer.contents), rows, self._n_vocab)

    def copy(self, source: int, target: int, start: int = -1, end: int = -1) -> None:
        """Add positions [start, end) of `source` (-1: open) to `target`, with its recurrent state.

        Nothing is copied on the device: the sequences share cells, and the next to write gets cells of its
        own. Only a sequence that has just been rolled back to a snapshot gets its state copied first.
        """
        for sequence in self._snapshots.pending & {source, target}:
            self._materialize(sequence)
        for sequence in (source, target):  # they share a state now, so neither can roll back in it
            self._snapshots.gone(sequence)
        if not self.unified:
            self._uncopied.add(target)
            self._copied_from.add(source)
        C.llama_memory_seq_cp(self._memory, source, target, start, end)

    def remove(self, sequence: int, start: int = -1, end: int = -1) -> bool:
        """Remove a sequence, or positions [start, end) of it; cells that no other sequence shares become
        free.

        Returns False, and changes nothing, if a recurrent state would have to be rolled back. Snapshots allow
        that for a sequence that was alone in the last call, which took one pass: by at most `n_snapshots`
        tokens, and not past the start of that call; operands for any whose last pass was a verification, if
        it shares its state with none. Raises LlamaError if llama.cpp would use a state that does not exist.
        """
        if start > 0 and self.n_snapshots:
            surplus = int(C.llama_memory_seq_pos_max(self._memory, sequence)) + 1 - start
            if surplus > 0:
                self._snapshots.went_back(sequence, surplus)
        else:
            self._snapshots.gone(sequence)
        return bool(C.llama_memory_seq_rm(self._memory, sequence, start, end))

    def save_on_device(self, sequence: int) -> None:
        """Copy a sequence's recurrent state to a device buffer, of which llama.cpp keeps one for each id.

        Waits for the device, and for the copy.
        """
        self._on_device[sequence] = self._save(sequence, ON_DEVICE)

    def restore_on_device(self, sequence: int) -> None:
        """Restore the state that `save_on_device` kept; `remove` then drops the cells of later tokens."""
        self._load(sequence, self._on_device[sequence], ON_DEVICE)

    def _materialize(self, sequence: int) -> None:
        """Overwrite a sequence's newest state with the snapshot that it was rolled back to."""
        self.save_on_device(sequence)
        self.restore_on_device(sequence)

    def save(self, sequence: int) -> npt.NDArray[np.uint8]:
        """A sequence's keys, values and recurrent state, copied to host memory. Waits for the device.

        Raises LlamaError if that is not possible, as for an id that was just a copy's target.
        """
        self._require_copied(sequence)
        return self._save(sequence, 0)

    def _save(self, sequence: int, flags: int) -> npt.NDArray[np.uint8]:
        size = int(C.llama_state_seq_get_size_ext(self._handle, sequence, flags))
        saved = np.empty(size, np.uint8)
        pointer = saved.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        written = C.llama_state_seq_get_data_ext(self._handle, pointer, size, sequence, flags)
        if written != size:
            raise LlamaError(f"{written} bytes of sequence {sequence} were saved, out of {size}")
        return saved

    def restore(self, sequence: int, saved: npt.NDArray[np.uint8]) -> None:
        """Restore a saved sequence to an id and overwrite what the id holds. Raises LlamaError if there is no
        room."""
        self._require_copied(sequence)
        if sequence in self._copied_from:  # its next decode would copy the restored state
            raise LlamaError(f"sequence {sequence} is copied from in the next decode")
        self._load(sequence, saved, 0)

    def _require_copied(self, sequence: int) -> None:
        if sequence in self._uncopied:
            raise LlamaError(f"sequence {sequence} is copied to in the next decode")

    def _load(self, sequence: int, saved: npt.NDArray[np.uint8], flags: int) -> None:
        self._snapshots.gone(sequence)
        pointer = saved.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if not C.llama_state_seq_set_data_ext(self._handle, pointer, saved.size, sequence, flags):
            raise LlamaError(f"llama.cpp could not restore {saved.size} bytes into sequence {sequence}")

    def clear(self, *, data: bool = False) -> None:
        """Remove all sequences; with `data` also clear the contents of their cells."""
        self._snapshots.clear()
        C.llama_memory_clear(self._memory, data)

    def close(self) -> None:
        """Free the context. Idempotent."""
        if self._handle:
            C.llama_free(self._handle)
            self._handle = None
