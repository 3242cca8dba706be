"""Runs llama.cpp's convert_hf_to_gguf.py on a checkpoint whose tokenizer it has not met.

It recognises a pre-tokenizer by a hash over the ids of one text, so only published vocabularies pass. Here
that one look-up answers qwen35; everything else is llama.cpp's code as it is.

    python -m tests.reference.llama_cpp_converter LLAMA_CPP CHECKPOINT OUT.gguf f16 [FLAG...]
"""

import runpy
import sys
from pathlib import Path
from typing import Any


def run(sources: Path, checkpoint: Path, out: Path, outtype: str, *flags: str) -> None:
    """Converts `checkpoint` (a folder) to `out` with the converter in `sources`, a llama.cpp tree.

    `flags`: further ones of that converter, such as --mmproj.
    """
    script = sources / "convert_hf_to_gguf.py"
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    def answer(self: Any, tokenizer: Any) -> str:
        return "qwen35"

    TextModel.get_vocab_base_pre = answer
    sys.argv = [str(script), str(checkpoint), "--outfile", str(out), "--outtype", outtype.lower()]
    sys.argv += flags
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
