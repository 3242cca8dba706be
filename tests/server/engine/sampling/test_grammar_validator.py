"""Grammars that would crash the process or never end are refused, and the next one is compiled."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.llamacpp import Model
from qwen_serve.llamacpp.tokenizer import llguidance_tokenizer
from qwen_serve.server.engine import EngineDead, InvalidGrammar, QueueFull
from qwen_serve.server.engine.sampling import grammar_validator
from qwen_serve.server.engine.sampling.grammar import WAITING, GrammarCompiler
from qwen_serve.server.engine.sampling.grammar_validator import GrammarValidator

N = 5000


def schema(value: Any) -> str:
    return f"start: %json {json.dumps(value)}"


def chain(link: Any) -> str:
    """A long chain of references. `link`: makes a schema from the next reference."""
    defs = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(N)}
    return schema({"$ref": "#/$defs/a0", "$defs": {**defs, f"a{N}": {"type": "null"}}})


DEADLY = {
    "rules": "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(N)) + f'a{N}: "x"',
    "terminals": "start: A0\n" + "".join(f'A{i}: "x" A{i + 1}\n' for i in range(N)) + f'A{N}: "x"',
    "references": chain(lambda ref: ref),
    "items": chain(lambda ref: {"type": "array", "items": ref}),
    "options": chain(lambda ref: {"anyOf": [{"type": "integer"}, ref]}),
}
ENDLESS = schema({"type": "object", "patternProperties": {f"^a{i}b.*$": {} for i in range(500)}})


def endless(name: str) -> str:
    """A grammar that takes very long to compile."""
    return ENDLESS.replace("^a", f"^{name}")


@pytest.fixture(scope="module", autouse=True)
def _impatient() -> Iterator[None]:
    """Shorten the time limit, which endless grammars use up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_validator, "CPU_SECONDS", 0.5)
        yield


@pytest.fixture(scope="module")
def compiler(nano_f32: Path) -> Iterator[GrammarCompiler]:
    model = Model(nano_f32, n_gpu_layers=0)
    compiler = GrammarCompiler(lambda: llguidance_tokenizer(model), model.eos)
    yield compiler
    compiler.close()


@pytest.mark.parametrize("kind", DEADLY)
def test_what_overflows_the_stack_is_refused(compiler: GrammarCompiler, kind: str) -> None:
    with pytest.raises(InvalidGrammar, match="too complex"):
        compiler.compile(DEADLY[kind]).result()
    assert compiler.compile(schema({"enum": [f"{kind} {i}" for i in range(500)]})).result()


def test_what_takes_too_long_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidGrammar, match="too complex"):
        compiler.compile(ENDLESS).result()
    assert compiler.compile('start: "a"').result()


def test_a_validator_has_no_opinion() -> None:
    """Errors in grammars are reported by the compiler."""
    validator = GrammarValidator(["<tool_call>"])
    for text in ("", "start: (", "start: missing", 'start: <tool_call> "a"', "start: <[300000]>", "\0", "é"):
        assert validator.compiles(text)
    validator.close()
    assert validator.compiles('start: "a"')
    validator.close()
    validator.close()


def test_complaints_are_short(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidGrammar) as refusal:
        compiler.compile("start: " + "(" * 20_000).result()
    assert len(str(refusal.value)) < 1000


@pytest.fixture
def tried(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that reach the validator."""
    tried: list[str] = []
    compiles = GrammarValidator.compiles

    def counted(validator: GrammarValidator, text: str, wanted: Callable[[], bool]) -> bool:
        tried.append(text)
        return compiles(validator, text, wanted)

    monkeypatch.setattr(GrammarValidator, "compiles", counted)
    return tried


def test_what_nobody_waits_for_is_not_compiled(compiler: GrammarCompiler, tried: list[str]) -> None:
    left = [compiler.compile(endless(f"left{i}")) for i in range(12)]
    good = compiler.compile('start: "good"')
    for future in left:
        assert future.cancel()
    assert good.result()
    assert len(tried) <= 2, "the one that ran, if it did, and the good one"
    assert tried[-1] == 'start: "good"'
    again = compiler.compile(endless("left0"))
    assert not again.done(), "what was interrupted is not refused"
    again.cancel()


def test_who_stays_gets_what_another_left(compiler: GrammarCompiler, tried: list[str]) -> None:
    blocker = compiler.compile(endless("blocker"))
    text = 'start: "shared"'
    one, other = compiler.compile(text), compiler.compile(text)
    one.cancel()
    blocker.cancel()
    assert other.result()
    assert tried.count(text) == 1


def test_few_may_wait(compiler: GrammarCompiler) -> None:
    waiting = [compiler.compile(endless(f"few{i}")) for i in range(WAITING)]
    with pytest.raises(QueueFull, match="grammars wait"):
        compiler.compile('start: "one more"')
    for future in waiting:
        future.cancel()
    assert compiler.compile('start: "one more"').result()


def test_a_refusal_is_kept(compiler: GrammarCompiler, tried: list[str]) -> None:
    for text in (endless("kept"), "start: missing_rule"):
        first = str(compiler.compile(text).exception())
        again = compiler.compile(text)
        assert again.done()
        assert str(again.exception()) == first
        assert tried.count(text) == 1


def test_a_validator_that_died_is_replaced(compiler: GrammarCompiler) -> None:
    """The next grammar is validated by a new process."""
    assert compiler.compile('start: "before"').result()
    process = compiler._validator._process  # noqa: SLF001 - dies of what is nobody's doing here
    assert process is not None
    process.kill()
    process.wait()
    assert compiler.compile('start: "after"').result()


def test_nobody_waits_for_one_that_stops(nano_f32: Path) -> None:
    model = Model(nano_f32, n_gpu_layers=0)
    compiler = GrammarCompiler(lambda: llguidance_tokenizer(model), model.eos)
    waiting = [compiler.compile(endless(f"stop{i}")) for i in range(8)]
    compiler.stop()
    assert all(isinstance(future.exception(), EngineDead) for future in waiting)
    with pytest.raises(EngineDead):
        compiler.compile('start: "a"')
    compiler.close()
