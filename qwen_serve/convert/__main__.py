"""`qwen-convert`."""

import os
import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # the imports take seconds, and nothing needs cleaning up yet
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import qwen_serve.llamacpp  # noqa: F401 - before numpy, see there

try:
    from qwen_serve.convert.cli import main
except ModuleNotFoundError as error:
    if (error.name or "").startswith("qwen_serve"):
        raise
    sys.exit(f"error: the converter needs {error.name}: pip install 'qwen-serve[convert]'")

if __name__ == "__main__":
    sys.exit(main())
