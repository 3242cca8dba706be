"""`make hops` counts one request's way."""

import re
import sys
from pathlib import Path

import pytest

from tests.processes import run
from tests.tree import ROOT


@pytest.mark.slow
def test_the_ways_in_and_out_are_named(nano_q4_k_m: Path) -> None:
    done = run([sys.executable, "-m", "tests.server.hops", nano_q4_k_m, "--list"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    figures = dict(re.findall(r"^(\w+(?: \w+)*)  +(\d+)", done.stdout, re.MULTILINE))
    ways = dict(re.findall(r"^(in|out):\n((?:  .+\n)+)", done.stdout, re.MULTILINE))
    for way, last in (("in", "Scheduler.add"), ("out", "RequestLogMiddleware._watched.<locals>.watched")):
        assert int(figures[f"hops {way}"]) == ways[way].count("\n")
        assert ways[way].splitlines()[-1].endswith(f" {last}")
    assert 0 < int(figures["functions a step"]) < int(figures["functions"])
    assert int(figures["calls a token"]) > 0
