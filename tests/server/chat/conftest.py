"""The nano model's real vocabulary, without a context."""

from pathlib import Path

import pytest

from qwen_serve.llamacpp import Model
from qwen_serve.server.chat import Prompter
from qwen_serve.server.engine import Vocab

TEMPLATE = Path(__file__).parents[3] / "chat_templates" / "qwen3_5.jinja"


@pytest.fixture(scope="session")
def vocab(nano_f16: Path) -> Vocab:
    return Vocab(Model(nano_f16, n_gpu_layers=0))


@pytest.fixture(scope="session")
def prompter(vocab: Vocab) -> Prompter:
    return Prompter(vocab, TEMPLATE.read_text())
