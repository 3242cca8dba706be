"""Stages are shared, resumed, repeated if out of date, and intact after being killed at any moment."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGUFReader

from qwen_serve.common.files import PART
from qwen_serve.convert.chunks import decode_chunks, decode_drafts
from qwen_serve.convert.cli import main
from qwen_serve.convert.errors import ConvertError
from qwen_serve.llamacpp.evaluation import EvalContext, Runtime
from tests.checkpoints import VOCAB, edit_json, write_checkpoint
from tests.marks import slow_but
from tests.waiting import wait_until

QUICK = ("--no-imatrix", "--no-kld")
TRIES = 20
EXIT = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
# Every chunk takes its time, so that a signal finds the writing at work.
SLOWLY = """
import sys, time
import qwen_serve.convert.gguf_file as gguf_file
gguf_file.CHUNK_ELEMENTS = 2000
run = gguf_file._run
def run_slowly(job, config, fd):
    time.sleep(0.02)
    return run(job, config, fd)
gguf_file._run = run_slowly
from qwen_serve.convert.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def run(checkpoint: Path, out: Path, *arguments: str | Path) -> None:
    flags = ["--src", checkpoint, "--out", out, "--threads", 1, *arguments]
    assert main([str(flag) for flag in flags]) == 0


def write_recipe(path: Path, *, prune: str = "[]") -> Path:
    path.write_text(f'type = "Q8_0"\nabout = "a test"\n[layers]\nprune = {prune}\n')
    return path


def times(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in out.glob("*") if path.name[0] != "."}


def test_float_types_alone(checkpoint: Path, out: Path) -> None:
    run(checkpoint, out, "--quant", "F16,F32")
    assert set(times(out)) == {
        "Random-1B-F16.gguf",
        "Random-1B-F16.json",
        "Random-1B-F32.gguf",
        "Random-1B-F32.json",
        "Random-1B.stages.json",
    }


def test_a_second_run_makes_nothing(checkpoint: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(checkpoint, out, "--quant", "Q8_0", *QUICK)
    before = times(out)
    run(checkpoint, out, "--quant", "Q8_0", *QUICK)
    assert times(out) == before
    told = capsys.readouterr()
    assert "Random-1B-Q8_0.gguf: already there" in told.err
    assert f"python -m qwen_serve.server --model {out}/Random-1B-Q8_0.gguf\n" in told.out


def test_quants_share_the_base_and_the_importance_matrix(checkpoint: Path, out: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the other day they gathered there " * 40)
    flags = ("--calibration", text, "--no-kld")
    run(checkpoint, out, "--quant", "Q3_K_M", *flags)
    before = times(out)
    run(checkpoint, out, "--quant", "Q3_K_M,Q2_K", *flags)
    after = times(out)
    assert after.keys() - before.keys() == {"Random-1B-Q2_K.gguf", "Random-1B-Q2_K.json"}
    assert {name for name in before if before[name] != after[name]} == {"Random-1B.stages.json"}
    text.write_text("another text altogether " * 60)
    run(checkpoint, out, "--quant", "Q2_K", *flags)
    changed = {name for name in after if after[name] != times(out)[name]}
    assert changed == {
        "Random-1B.imatrix.gguf",
        "Random-1B-Q2_K.gguf",
        "Random-1B-Q2_K.json",
        "Random-1B.stages.json",
    }


@pytest.mark.slow
def test_another_method_makes_the_same_file_anew(
    checkpoint: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the other day they gathered there " * 40)
    flags = ("--quant", "Q8_0", "--calibration", text, "--no-kld", "--show-tensors")
    run(checkpoint, out, *flags)
    assert "method      nearest" in capsys.readouterr().out
    before, nearest = times(out), (out / "Random-1B-Q8_0.gguf").read_bytes()
    run(checkpoint, out, *flags, "--method", "compensated")
    assert "method      compensated" in capsys.readouterr().out
    changed = {name for name in before if before[name] != times(out)[name]}
    assert changed == {"Random-1B-Q8_0.gguf", "Random-1B-Q8_0.json", "Random-1B.stages.json"}
    fields = GGUFReader(out / "Random-1B-Q8_0.gguf").fields
    assert fields["quantize.method"].contents() == "compensated"
    run(checkpoint, out, *flags)
    assert (out / "Random-1B-Q8_0.gguf").read_bytes() == nearest


def test_distillation_comes_last_and_is_on_record(
    checkpoint: Path,
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without torch: what it is called with, and what the files say; tests/reference trains."""
    calls: list[tuple[object, ...]] = []

    def distill(base: Path, quantized: Path, *, text: Path, steps: int, runtime: Runtime) -> None:
        assert quantized.is_file()
        calls.append((base.name, text.name, steps))
        if steps == 2:
            raise ConvertError("it did not help")

    monkeypatch.setitem(sys.modules, "qwen_serve.convert.distillation", SimpleNamespace(distill=distill))
    monkeypatch.setattr("qwen_serve.convert.cli.find_spec", lambda name: object())
    text = tmp_path / "text.txt"
    text.write_text("the other day they gathered there " * 40)
    flags = ("--quant", "Q8_0", "--calibration", text, *QUICK, "--show-tensors")
    run(checkpoint, out, *flags)
    run(checkpoint, out, *flags, "--distill", "3")
    assert "method      nearest, distilled in 3 steps" in capsys.readouterr().out
    fields = GGUFReader(out / "Random-1B-Q8_0.gguf").fields
    assert fields["quantize.distillation.steps"].contents() == 3
    assert fields["quantize.distillation.dataset"].contents() == "text.txt"
    assert "quantize.method" not in fields
    before = (out / "Random-1B-Q8_0.gguf").read_bytes()
    failing = ["--src", checkpoint, "--out", out, *flags, "--distill", "2"]
    assert main([str(flag) for flag in failing]) == 1
    assert (out / "Random-1B-Q8_0.gguf").read_bytes() == before
    assert calls == [("Random-1B-F16.gguf", "text.txt", steps) for steps in (3, 2)]


def test_a_changed_checkpoint_makes_everything_again(checkpoint: Path, out: Path) -> None:
    run(checkpoint, out, "--quant", "Q8_0", *QUICK)
    before = times(out)
    edit_json(checkpoint / "generation_config.json", top_k=7)
    run(checkpoint, out, "--quant", "Q8_0", *QUICK)
    assert all(before[name] != time_ for name, time_ in times(out).items())
    fields = GGUFReader(out / "Random-1B-Q8_0.gguf").fields
    assert fields["general.sampling.top_k"].contents() == 7


def test_force_makes_everything_again(checkpoint: Path, out: Path) -> None:
    run(checkpoint, out, "--quant", "F16")
    before = times(out)
    run(checkpoint, out, "--quant", "F16", "--force")
    assert all(before[name] != time_ for name, time_ in times(out).items())


def test_a_pruned_model_runs_with_its_draft_head(checkpoint: Path, out: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "short.toml", prune="[0, 1, 2, 3]")
    run(checkpoint, out, "--recipe", recipe, *QUICK)
    assert (out / "Random-1B-drop0-3-F16.gguf").is_file()
    assert not (out / "Random-1B-F16.gguf").exists()  # nothing here needs the whole model
    tokens = np.arange(8, dtype=np.int32)[None]
    with Runtime(threads=1).load(out / "Random-1B-short.gguf") as model:
        assert (model.n_layer, model.n_nextn) == (4, 1)
        with EvalContext(model, n_ctx=64, n_batch=64, precise=True) as trunk:
            trunk.keep_hidden()
            decode_chunks(trunk, tokens, output=True)
            logits, hidden = trunk.logits().copy(), trunk.hidden().copy()
        with EvalContext(model, n_ctx=64, n_batch=64, kind="mtp", precise=True) as mtp:
            decode_drafts(mtp, tokens, hidden, output=True)
            drafts = mtp.logits().copy()
    assert logits.shape == (8, VOCAB)
    assert drafts.shape == (7, VOCAB)
    assert np.isfinite(logits).all()
    assert np.isfinite(drafts).all()


def interrupted(
    command: list[str | Path],
    out: Path,
    sent: signal.Signals,
    at_work: Callable[[subprocess.Popen[str]], object],
) -> str:
    """Run ``command``, send the signal when ``at_work`` returns, and give back what it wrote to stderr.

    The machine decides whether the command is still at work by then: a run that has ended is made again.
    """
    for _ in range(TRIES):
        shutil.rmtree(out, ignore_errors=True)
        process = subprocess.Popen(
            [str(part) for part in command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        at_work(process)
        process.send_signal(sent)
        error = process.communicate(timeout=300)[1]
        if process.returncode != 0:
            assert process.returncode == EXIT[sent], error
            return error
    return pytest.fail(f"{TRIES} runs ended before the signal reached them")


def seen(stage: str) -> Callable[[subprocess.Popen[str]], bool]:
    """Waits for a stage's line on stderr."""
    return lambda process: any(line.startswith(stage) for line in process.stderr or ())


@pytest.mark.parametrize("after_s", slow_but([0.2], [0.0, 0.2, 0.6]))
@pytest.mark.parametrize("sent", slow_but([signal.SIGKILL], [*EXIT]), ids=lambda s: s.name)
def test_an_interrupted_run_is_finished_by_the_next(
    checkpoint: Path, out: Path, tmp_path: Path, sent: signal.Signals, after_s: float
) -> None:
    run(checkpoint, tmp_path / "whole", "--quant", "F16")
    target = out / "Random-1B-F16.gguf"

    def parts() -> list[Path]:
        return list(out.glob(f".{target.name}.*{PART}"))

    def writing(process: subprocess.Popen[str]) -> None:
        # the folder is removed at exit only once tempfile has noted it: wait for a file in it
        begun = f".{target.name}.*{PART}/*"
        wait_until(lambda: any(out.glob(begun)) or process.poll() is not None)
        time.sleep(after_s)  # the signal is to come at any moment

    flags = ("--src", checkpoint, "--out", out, "--quant", "F16")
    command: list[str | Path] = [sys.executable, "-c", SLOWLY, *flags]
    interrupted(command, out, sent, writing)
    assert not target.exists()
    assert bool(parts()) == (sent == signal.SIGKILL)
    run(checkpoint, out, "--quant", "F16")
    assert target.read_bytes() == (tmp_path / "whole" / target.name).read_bytes()
    assert not parts()


def test_a_killed_run_keeps_the_stages_it_finished(checkpoint: Path, out: Path) -> None:
    run(checkpoint, out, "--quant", "F16")
    base = out / "Random-1B-F16.gguf"
    (left := out / f".Random-1B-Q8_0.gguf.x{PART}").mkdir()
    (left / "Random-1B-Q8_0.gguf").write_bytes(b"half")
    before = base.stat().st_mtime_ns
    run(checkpoint, out, "--quant", "Q8_0", *QUICK)
    assert base.stat().st_mtime_ns == before
    assert not list(out.glob(f".*{PART}"))


def test_several_models_share_a_folder(checkpoint: Path, out: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "Random-1B-Other", seed=3)
    foreign = out / f".Random-1Bx-F16.gguf.x{PART}" / "Random-1Bx-F16.gguf"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"not ours")
    run(checkpoint, out, "--quant", "F16")
    before = times(out)
    run(other, out, "--quant", "F16")
    after = times(out)
    assert all(after[name] == before[name] for name in before)
    assert foreign.exists()


def converting(checkpoint: Path, out: Path, *flags: str | Path) -> list[str | Path]:
    convert = [sys.executable, "-m", "qwen_serve.convert"]
    return [*convert, "--src", checkpoint, "--out", out, "--threads", "1", *flags]


@pytest.mark.parametrize("after_s", slow_but([0.1], [0.0, 0.1, 0.2]))
@pytest.mark.parametrize(
    "sent", slow_but([signal.SIGINT], [signal.SIGINT, signal.SIGTERM]), ids=lambda s: s.name
)
def test_an_interrupt_is_not_lost_in_callbacks(
    checkpoint: Path, out: Path, tmp_path: Path, sent: signal.Signals, after_s: float
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the other day they gathered there " * 16000)  # more than is read before the signal
    flags = ("--quant", "Q2_K", "--calibration", text, "--no-kld")
    command = converting(checkpoint, out, *flags)

    def reading(process: subprocess.Popen[str]) -> None:
        assert seen("Importance matrix:")(process)
        time.sleep(after_s)  # the signal is to come at any moment

    error = interrupted(command, out, sent, reading)
    if after_s:  # at once, it may come before the first rows are read
        assert "Importance matrix: stopped after" in error
    assert "ignored" not in error
    assert not (out / "Random-1B.imatrix.gguf").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "sent"),
    [
        ("Importance matrix:", signal.SIGINT),
        ("Quantizing to Q2_K:", signal.SIGINT),
        ("Quantizing to Q2_K:", signal.SIGKILL),
    ],
)
def test_llama_cpp_at_work_may_be_interrupted_too(
    checkpoint: Path, out: Path, tmp_path: Path, stage: str, sent: signal.Signals
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the other day they gathered there " * 80)
    flags = ("--quant", "Q2_K", "--calibration", text, "--no-kld")
    command = converting(checkpoint, out, *flags)
    interrupted(command, out, sent, seen(stage))
    base = (out / "Random-1B-F16.gguf").stat().st_mtime_ns
    run(checkpoint, out, *flags)
    assert (out / "Random-1B-F16.gguf").stat().st_mtime_ns == base
    run(checkpoint, tmp_path / "whole", *flags)
    for name in ("Random-1B.imatrix.gguf", "Random-1B-Q2_K.gguf"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list(out.glob(f".*{PART}"))
