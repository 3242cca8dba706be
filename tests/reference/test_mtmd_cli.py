"""The same picture and question through llama.cpp's own llama-mtmd-cli: the same greedy answer."""

import os
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qwen_serve.bench.servers.builds import build_programs
from qwen_serve.llamacpp.vision import VisionTower
from qwen_serve.server.engine.pictures import Picture, row_ids
from tests import heldout
from tests.processes import run
from tests.reference.seeing import seeing_nano, write_tower
from tests.server.engine.test_pictures import Bare
from tests.server.seeing import needs_vision

pytestmark = [pytest.mark.reference, needs_vision]

N = 12
FLAGS = ["--jinja", "-t", "1", "-c", "1024", "-fa", "off", "-ctk", "f32", "-ctv", "f32"]
FLAGS += ["--no-warmup", "--no-repack"]
BEFORE, AFTER = (
    "<|im_start|>user\n<|vision_start|>",
    "<|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n<think>\n",
)


@pytest.fixture(scope="module")
def program() -> Path:
    return build_programs(["llama-mtmd-cli"], patched=False) / "llama-mtmd-cli"


def test_answers_are_those_of_llama_cpps_own_command(program: Path, nano_f32: Path, tmp_path: Path) -> None:
    mmproj = write_tower(seeing_nano(tmp_path))
    bare = Bare(nano_f32)
    answers = []
    with VisionTower(mmproj, bare.model, threads=1, flash_attn=False, warm_up=False) as tower:
        for row in heldout.read("pictures")[:4]:
            data = b64decode(row["picture"].partition(",")[2])
            (tmp_path / "shown.png").write_bytes(data)
            prepared = tower.prepare(np.asarray(Image.open(BytesIO(data)).convert("RGB")))
            rows = tower.encode(prepared)
            seen = Picture(row_ids(b"any", len(rows)), rows, prepared.positions, prepared.n_pos)
            before, after = (bare.model.tokenize(text) for text in (BEFORE, AFTER.format(row["question"])))
            pieces = [bare.model.piece(t, special=True) for t in bare.greedy([before, seen, after], N)]
            expected = b"".join(pieces).decode("utf-8", "replace").strip()
            command = [program, "-m", nano_f32, "--mmproj", mmproj, "--image", tmp_path / "shown.png"]
            command += ["-p", row["question"], "-n", N, "--temp", 0, *FLAGS]
            environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
            done = run(map(str, command), check=True, env=environment)
            answer = done.stdout.strip()
            assert answer and expected.startswith(answer), (row["question"], expected, answer)
            answers.append(answer)
    bare.close()
    assert len(set(answers)) > 1
