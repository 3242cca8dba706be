"""Grammars that would end the process, or never end, are refused, and the next one is compiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from server.engine import InvalidGrammar
from server.engine.grammar import GrammarCompiler
from server.engine.grammar_trial import GrammarTrial
from server.engine.llama import Model
from server.engine.llama.tokenizer import llguidance_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

N = 5000


def schema(value: Any) -> str:
    return f"start: %json {json.dumps(value)}"


def chain(link: Any) -> str:
    """References that lead on and on: `link` makes a schema of the next reference."""
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


def test_a_trial_has_no_opinion() -> None:
    """What is wrong is left for the compiler to tell."""
    trial = GrammarTrial(["<tool_call>"])
    for text in ("", "start: (", "start: missing", 'start: <tool_call> "a"', "start: <[300000]>", "\0", "é"):
        assert trial.survives(text)
    trial.close()
    assert trial.survives('start: "a"')
    trial.close()
    trial.close()


def test_complaints_are_short(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidGrammar) as refusal:
        compiler.compile("start: " + "(" * 20_000).result()
    assert len(str(refusal.value)) < 1000
