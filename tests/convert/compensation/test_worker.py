"""A worker in another process gives what one here gives, passes errors on, and says when it has ended."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import Pipe
from threading import Thread

import pytest
from gguf import GGMLQuantizationType as Type

from qwen_serve.convert.compensation.worker import Worker, _Remote, serve, working
from qwen_serve.convert.errors import ConvertError
from qwen_serve.llamacpp.weights import dequantize_rows

import numpy as np  # isort: skip

RNG = np.random.default_rng(3)
INPUTS = RNG.standard_normal((300, 256)).astype(np.float32)
ROWS = RNG.standard_normal((4, 256)).astype(np.float32)


def test_calls_go_to_the_other_side() -> None:
    ours, theirs = Pipe()
    other = Thread(target=serve, args=(theirs, Worker(np.array)))
    other.start()
    here, there = Worker(np.array), _Remote(ours)
    results = []
    for worker in (here, there):
        worker.add(("w", 0), INPUTS)
        worker.prepare(("w", 0), 256)
        packed, values = worker.round(Type.Q4_K, ROWS, 1)
        np.testing.assert_array_equal(dequantize_rows(packed, Type.Q4_K), values)
        results.append((packed.tobytes(), worker.loss(ROWS, values)))
    assert results[0] == results[1]
    there.add(("w", 0), np.array([[1.0, np.inf]], np.float32))
    with pytest.raises(ConvertError, match="inputs of w are not finite"):
        there.prepare(("w", 0), 2)
    theirs.close()
    ours.close()
    other.join()
    with pytest.raises(ConvertError, match="has ended"):
        there.prepare(("w", 0), 2)


def test_without_inputs_no_error_is_carried_on() -> None:
    none, plain = Worker(np.array), Worker(np.array)
    plain.add(("w", 0), np.eye(256, dtype=np.float32))
    for worker in (none, plain):
        worker.prepare(("w", 0), 256)
    assert none.loss(ROWS, 0 * ROWS) == pytest.approx(np.square(ROWS).sum(), rel=1e-5)
    assert none.round(Type.Q6_K, ROWS)[0].tobytes() == plain.round(Type.Q6_K, ROWS)[0].tobytes()


def test_a_weight_s_matrices_are_dropped_together() -> None:
    worker = Worker(np.array)
    for key in (("w", 0), ("w", 1), ("v", 0)):
        worker.add(key, INPUTS * 2)
    worker.drop("w")
    worker.prepare(("w", 1), 256)
    without = worker.loss(ROWS, 0 * ROWS)
    worker.prepare(("v", 0), 256)
    assert worker.loss(ROWS, 0 * ROWS) != pytest.approx(without)


def test_the_other_process_does_not_load_llama_cpp() -> None:
    code = "import sys, qwen_serve.convert.compensation.worker; sys.exit('llama_cpp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_device_it_works_here() -> None:
    with working(None) as worker:
        assert type(worker) is Worker
