"""``python server``: the same as ``python -m qwen_serve.server``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from qwen_serve.server.__main__ import main

    main()
