"""``python -m qwen_serve.bench COMMAND``, and ``python bench COMMAND``."""

import sys
from pathlib import Path

if not __package__:  # run as a folder (`python bench`), or through a file such as bench/latency.py
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from qwen_serve.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
