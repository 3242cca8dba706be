"""`qwen-convert`."""

import os
import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # the imports take seconds, and there is nothing to clean up
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import llama_cpp  # noqa: F401 - before numpy: some CUDA builds crash at model load the other way round

from qwen_serve.convert.cli import main

if __name__ == "__main__":
    sys.exit(main())
