"""`python -m qwen_serve.server`, from the inside."""

import gc
from pathlib import Path

from qwen_serve.server.__main__ import load
from qwen_serve.server.settings import Settings


def test_what_is_there_once_loaded_is_not_collected_again(nano_f16: Path) -> None:
    settings = Settings(model=nano_f16, ctx_size=512, parallel=1, threads=1, prefix_cache=False)
    before = gc.get_freeze_count()
    backend = load(settings)
    try:
        assert gc.get_freeze_count() > before
    finally:
        backend.engine.close()
