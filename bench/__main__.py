"""``python -m bench COMMAND``. Files such as ``python bench/latency.py``, are commands by their names."""

import sys
from pathlib import Path

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.cli import main

if __name__ == "__main__":
    command = Path(sys.argv[0]).stem
    sys.exit(main([command, *sys.argv[1:]] if command not in ("__main__", "bench") else None))
