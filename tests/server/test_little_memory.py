"""A limit of the address space: an error of one line that names memory and a setting, and no native trace."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run

LIMIT = 800
"""MiB of address space: more than the program takes without a model, and less than with one."""


@pytest.mark.timeout(300)
def test_little_address_space_is_told(nano_q4_k_m: Path) -> None:
    server = f"exec {sys.executable} -m qwen_serve.server --port 0 --threads 1 --mmproj off --ctx-size 2048"
    script = f"ulimit -v {LIMIT * 1024}; {server} --parallel 2 --model {nano_q4_k_m}"
    done = run(["bash", "-c", script], timeout=250)
    told = done.stderr
    assert done.returncode == 1, told[-3000:]
    assert "\n#0" not in told
    assert "ulimit -v" in told
    assert any(name in told for name in ("ctx_size", "parallel"))


def test_an_assertion_of_llama_cpp_ends_with_one_line() -> None:
    code = (
        "from qwen_serve.llamacpp.aborts import end_with_a_line\n"
        "from qwen_serve.llamacpp.ggml import quick\n"
        "import ctypes\n"
        "end_with_a_line(lambda said: f'stopped ({said})', 7)\n"
        "quick('ggml_abort', None, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p)(b'a.c', 5, b'no memory')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "stopped (a.c:5: no memory)\n")
