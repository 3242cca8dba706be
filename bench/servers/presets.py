"""llama-server's set-ups by name: parts that are joined with ``+``, such as ``mtp-4+backend-sampling``.

Flags are those of the llama.cpp inside the pinned llama-cpp-python (common/arg.cpp). Left alone, its server
keeps the prompt of each slot, saves prompts to host memory (8 GiB), takes checkpoints of the recurrent state
on the host, samples there, and does not speculate.
"""

import re

from bench.errors import BenchError

NO_HOST_CACHES = ("--cache-ram", "0", "--ctx-checkpoints", "0")

PARTS: dict[str, tuple[str, ...]] = {
    "cache": (),
    "no-host-caches": NO_HOST_CACHES,
    "plain": ("--no-cache-prompt", *NO_HOST_CACHES),
    "backend-sampling": ("--backend-sampling",),
    "tuned": (*NO_HOST_CACHES, "--backend-sampling", "--ubatch-size", "2048", "--batch-size", "8192"),
    "ngram-mod": ("--spec-default",),
    "ngram-simple": ("--spec-type", "ngram-simple"),
}
DRAFTS = re.compile(r"(mtp|dflash)-([1-9]\d?)")

HELP = """\
llama-server's parts, joined with ``+``:

* ``tuned``: its fastest settings on a GPU: no caches in host memory, sampling on the device, ubatches of
  2,048 and batches of 8,192 tokens; with ``mtp-N`` or ``ngram-mod`` what this repository compares itself with
* ``cache``: as it comes: prompts kept in slots and in host memory, no speculation
* ``plain``: nothing reused between requests, no speculation
* ``no-host-caches``: without the prompt cache and checkpoints in host memory
* ``backend-sampling``: samples on the device
* ``mtp-N``: drafts N tokens with the model's multi-token-prediction head
* ``dflash-N``: drafts N tokens with a block drafter, which --spec-draft-model names
* ``ngram-mod``: --spec-default: n-gram drafts of 48 to 64 tokens, shared by all requests
* ``ngram-simple``: n-gram drafts from the request's own text"""


def preset_flags(preset: str) -> tuple[str, ...]:
    """The flags that ``a+b+c`` stands for; an empty one is llama-server as it comes. Raises BenchError."""
    flags: list[str] = []
    for part in filter(None, preset.split("+")):
        if match := DRAFTS.fullmatch(part):
            flags += ["--spec-type", f"draft-{match[1]}", "--spec-draft-n-max", match[2]]
        elif part in PARTS:
            flags += PARTS[part]
        else:
            known = ", ".join([*PARTS, "mtp-N", "dflash-N"])
            raise BenchError(f"--peer llama-server:{preset}: no part {part!r}; there are {known}")
    return tuple(flags)
