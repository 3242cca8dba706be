"""The names of the changes in libllama, and LLAMA_PATCHES_HIDE, which the server does without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_serve.llamacpp import HAS_RING, SHARES_SNAPSHOTS, patches
from qwen_serve.llamacpp.patches import HIDE, RING, SHARED_SNAPSHOTS
from tests.patches.changes import changes
from tests.processes import run

PATCHES = Path(__file__).parents[2] / "patches" / "llama.cpp"
TOLD = """
import ctypes, sys
import llama_cpp.llama_cpp as C
C._lib.llama_patches = ctypes.CDLL(sys.argv[1]).llama_patches
from qwen_serve.llamacpp.patches import READS_OWN_CELLS, amx_is_right, patches
print(READS_OWN_CELLS, amx_is_right(), *patches())
"""
"""With another library's answer."""

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
    known = "amx-broadcast, batch-invariant, f16-copies, layer-inputs-ring, operand-verification, "
    known += "repacked-weights, row-sampler, shared-snapshots"
    assert f"LLAMA_PATCHES_HIDE: mmq-thin: want some of {known}" in done.stderr


@pytest.mark.parametrize("numbered", [False, True], ids=["this one", "one of the days of a patch a change"])
def test_a_library_tells_its_changes_by_name(tmp_path: Path, numbered: bool) -> None:
    """What the server does, and which stored measurements it takes, depends on the names."""
    names = changes(PATCHES)
    answer = " ".join(f"{number:04}-{name}" if numbered else name for number, name in enumerate(names, 101))
    (tmp_path / "a.c").write_text(f'const char * llama_patches(void) {{ return "{answer}"; }}\n')
    library = tmp_path / "a.so"
    run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "a.c"], check=True)
    done = run([sys.executable, "-c", TOLD, library], check=True)
    assert done.stdout.split() == ["True", "True", *names]
