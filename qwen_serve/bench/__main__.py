"""``python -m qwen_serve.bench COMMAND``: the same as ``qwen-bench COMMAND``."""

import sys

from qwen_serve.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
