"""``python bench COMMAND``: the same as ``qwen-bench COMMAND``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from qwen_serve.bench.cli import main

    sys.exit(main())
