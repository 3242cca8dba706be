"""The model's own text: prompts, template, batched sampling."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qwen_serve.convert.calibration import text as writing
from qwen_serve.convert.calibration import write_text
from qwen_serve.convert.calibration.prompts import ChatTemplate, Prompt, load_prompts
from qwen_serve.convert.calibration.sampler import Request, complete
from qwen_serve.convert.calibration.text import load_mixture
from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.cli import main
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.floats import convert
from qwen_serve.convert.progress import Progress
from qwen_serve.convert.safetensors import read_header, write_file
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.llamacpp.evaluation import Runtime
from qwen_serve.llamacpp.model import Model

RUNTIME = Runtime(threads=1, n_gpu_layers=0)
HI = Prompt("x", False, "Hi").messages


def test_about_a_hundred_prompts_of_every_kind() -> None:
    prompts = load_prompts("calibration")
    assert 90 <= len(prompts) <= 130
    kinds = Counter((prompt.subject, prompt.thinking) for prompt in prompts)
    subjects = ("English", "Chinese", "code", "mathematics", "instructions")
    assert set(kinds) == {(subject, thinking) for subject in subjects for thinking in (True, False)}
    assert min(kinds.values()) >= 5


def test_calibration_and_evaluation_share_no_prompt() -> None:
    texts = [prompt.text for prompt in load_prompts("calibration") + load_prompts("evaluation")]
    assert len(texts) == len(set(texts))


def test_the_template_is_told_whether_to_think() -> None:
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{{ '<think>' if enable_thinking else '<no>' }}{% endif %}"
    )
    assert template.render(HI, thinking=True) == "[user]Hi[assistant]<think>"
    assert template.render(HI, thinking=False) == "[user]Hi[assistant]<no>"


def test_templates_that_do_not_work() -> None:
    with pytest.raises(ConvertError, match="does not compile"):
        ChatTemplate("{% for %}")
    with pytest.raises(ConvertError, match="rejects a user message: no users here"):
        ChatTemplate("{{ raise_exception('no users here') }}").render(HI, thinking=False)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MIN_TOKENS", {"calibration": 600, "search": 600, "evaluation": 600})
    monkeypatch.setattr(writing, "MAX_NEW", 12)
    monkeypatch.setattr(writing, "MAX_NEW_THINKING", 16)
    monkeypatch.setattr(writing, "load_prompts", lambda purpose: load_prompts(purpose)[::9])


@pytest.mark.usefixtures("short")
def test_the_text_is_long_enough_templated_and_reproducible(nano_f16: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "1.txt", tmp_path / "2.txt"
    for out in (first, second):
        write_text(nano_f16, out, purpose="evaluation", runtime=RUNTIME)
    text = first.read_text(encoding="utf-8")
    assert text == second.read_text(encoding="utf-8")
    for prompt in load_prompts("evaluation")[::9]:
        assert f"<|im_start|>user\n{prompt.text}<|im_end|>\n<|im_start|>assistant\n<think>\n" in text
    with RUNTIME.load(nano_f16) as model:
        assert len(model.tokenize(text)) >= 600


def test_calibration_and_search_share_no_document_and_evaluation_none() -> None:
    calibration, search = load_mixture("calibration"), load_mixture("search")
    assert len(calibration) > 2 * len(search) > 0
    assert not set(calibration) & set(search)
    assert not load_mixture("evaluation")
    assert not [text for text in (*calibration, *search) if "def __init__" in text], "no Python"


@pytest.mark.usefixtures("short")
def test_calibration_text_goes_on_with_the_mixture(nano_f16: Path, tmp_path: Path) -> None:
    for purpose in ("calibration", "search"):
        write_text(nano_f16, tmp_path / "text", purpose=purpose, runtime=RUNTIME)
        assert "\n".join(load_mixture(purpose)) in (tmp_path / "text").read_text(encoding="utf-8")


@pytest.mark.usefixtures("short")
def test_the_two_purposes_get_different_text(
    nano_f16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for purpose in ("calibration", "evaluation"):
        write_text(nano_f16, tmp_path / purpose, purpose=purpose, runtime=RUNTIME)
        shown = capsys.readouterr().err
        assert shown.count(": 600 tokens\n") == 1, "one bar, however often the prompts are answered"
        assert f"Writing {purpose} text: done, 600 tokens in " in shown
    assert (tmp_path / "calibration").read_text() != (tmp_path / "evaluation").read_text()


def test_progress_is_of_the_answers_where_they_are_long(
    nano_f16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prompt is answered, so that a text that is long enough at half of them is half done."""

    def complete(
        model: Model, requests: list[Request], show: Callable[[Request], None], threads: int
    ) -> None:
        for number, request in enumerate(requests, 1):
            request.generated = request.prompt[:8]
            show(request)
            shown = sum(advanced)
            assert shown <= 600 * number / len(requests)
        assert shown == 600

    advanced: list[int] = []
    monkeypatch.setattr(writing, "complete", complete)
    monkeypatch.setattr(writing, "MIN_TOKENS", {"evaluation": 600})
    monkeypatch.setattr(Progress, "advance", lambda self, count=1: advanced.append(count))
    write_text(nano_f16, tmp_path / "1.txt", purpose="evaluation", runtime=RUNTIME)
    assert min(advanced) >= 0


def test_more_requests_than_run_at_once_are_all_finished(
    nano_f16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen_serve.convert.calibration.sampler.PARALLEL", 3)
    with RUNTIME.load(nano_f16) as model:
        prompts = [model.tokenize(f"Count from {n}:") for n in range(8)]
        requests = [Request(prompt, 5 + i, (1, i)) for i, prompt in enumerate(prompts)]
        finished: list[Request] = []
        complete(model, requests, finished.append)
        assert sorted(map(id, finished)) == sorted(map(id, requests))
        for request in requests:
            ended = request.generated[-1] in model.eog_ids
            assert len(request.generated) == request.max_new or ended
            assert not any(token in model.eog_ids for token in request.generated[:-1])
            assert not set(request.generated) & set(model.unused_tokens())


def test_seeds_decide(nano_f16: Path) -> None:
    with RUNTIME.load(nano_f16) as model:
        prompt = model.tokenize("Once upon a time")
        requests = [Request(prompt, 24, (seed,)) for seed in (1, 1, 2)]
        complete(model, requests, lambda request: None)
    assert requests[0].generated == requests[1].generated
    assert requests[0].generated != requests[2].generated


def test_a_model_without_a_chat_template(
    nano_f16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "metadata", lambda self: {})
    with pytest.raises(ConvertError, match=r"no tokenizer\.chat_template.*--calibration FILE and --no-kld"):
        write_text(nano_f16, tmp_path / "t.txt", purpose="calibration", runtime=RUNTIME)
    assert not (tmp_path / "t.txt").exists()


def test_a_model_whose_logits_are_not_finite_writes_no_text(checkpoint: Path, tmp_path: Path) -> None:
    """Finite weights, whose products overflow."""
    tensor = Checkpoint.open(checkpoint).tensors["model.language_model.norm.weight"]
    tensors = [(t.name, t.dtype, t.read().reshape(t.shape)) for t in read_header(tensor.path)]
    values = next(values for name, _, values in tensors if name == tensor.name)
    values[:] = convert(np.full(values.shape, 3e38, np.float32), "F32", tensor.dtype)
    write_file(tensor.path, tensors, {})
    assert main(["--src", str(checkpoint), "--out", str(tmp_path), "--quant", "F16"]) == 0
    gguf = tmp_path / f"{checkpoint.name}-F16.gguf"
    with pytest.raises(LlamaError, match=r"-F16\.gguf: the model's logits are not finite; is the"):
        write_text(gguf, tmp_path / "text.txt", purpose="calibration", runtime=RUNTIME)
