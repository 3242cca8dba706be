"""``python bench/latency.py``: the same as ``qwen-bench latency``."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.argv.insert(1, Path(__file__).stem)
    runpy.run_path(str(Path(__file__).parent), run_name="__main__")
