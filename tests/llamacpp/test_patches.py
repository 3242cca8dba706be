"""LLAMA_PATCHES_HIDE: the server without some of its libllama's patches."""

import os
import subprocess
import sys

import pytest

from qwen_serve.llamacpp import HAS_RING, SHARES_SNAPSHOTS, patches
from qwen_serve.llamacpp.patches import HIDE, RING, SHARED_SNAPSHOTS
from tests.processes import run

TELL = (
    "from qwen_serve.llamacpp import HAS_RING, SHARES_SNAPSHOTS, patches; "
    "from qwen_serve.llamacpp.snapshots import n_rs_seq; "
    "print(HAS_RING, SHARES_SNAPSHOTS, n_rs_seq(3) == 3, *patches())"
)


def told(hidden: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, HIDE: hidden}
    return run([sys.executable, "-c", TELL], env=environment)


@pytest.mark.skipif(not (HAS_RING and SHARES_SNAPSHOTS), reason="a llama.cpp without these patches")
@pytest.mark.parametrize("hidden", [(), (SHARED_SNAPSHOTS,), (RING, SHARED_SNAPSHOTS)])
def test_what_is_hidden_is_not_used(hidden: tuple[str, ...]) -> None:
    ring, shared, every, *names = told(",".join(hidden)).stdout.split()
    assert ring == str(RING not in hidden)
    assert shared == str(SHARED_SNAPSHOTS not in hidden)
    assert every == str(SHARED_SNAPSHOTS in hidden)
    assert names == [name for name in patches() if name not in hidden]


def test_what_the_server_cannot_do_without_is_refused() -> None:
    done = told("layer-inputs-ring,mmq-thin")
    assert done.returncode != 0
    known = (
        "amx-broadcast, batch-invariant, f16-copies, layer-inputs-ring, repacked-weights, shared-snapshots"
    )
    assert f"LLAMA_PATCHES_HIDE: mmq-thin: want some of {known}" in done.stderr
