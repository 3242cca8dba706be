"""`python -m convert`."""

import sys

import llama_cpp  # noqa: F401 - before numpy: some CUDA builds crash at model load the other way round

from convert.cli import main

if __name__ == "__main__":
    sys.exit(main())
