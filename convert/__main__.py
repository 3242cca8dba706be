"""``python convert``: the same as ``qwen-convert``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from qwen_serve.convert.__main__ import main

    sys.exit(main())
