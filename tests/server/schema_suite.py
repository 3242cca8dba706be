"""How many JSON schemas compile, and whether documents written at random within them are all valid.

    python -m tests.server.schema_suite MODEL.gguf FOLDER [--documents 3]

FOLDER has JSON files: each a schema, or the JSON Schema Test Suite's lists of {"schema": ...}. No model is
asked: any token of MODEL's vocabulary that may come next is as likely as any other, which finds more corners
than a model would. A schema that is refused is one that a request would get a 400 for.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np

from qwen_serve.bench.terminal import Table
from qwen_serve.llamacpp import Model
from qwen_serve.llamacpp.tokenizer import llguidance_tokenizer
from qwen_serve.server.chat.errors import PromptError
from qwen_serve.server.chat.formats import compose, json_format
from qwen_serve.server.engine import Grammar, InvalidGrammar
from qwen_serve.server.engine.sampling.grammar import GrammarCompiler


def schema_suite(gguf: Path, folder: Path, documents: int, longest: int, seed: int) -> int:
    """The number of invalid documents."""
    model = Model(gguf, n_gpu_layers=0)
    grammars = GrammarCompiler(lambda: llguidance_tokenizer(model), model.eos)
    counts = dict.fromkeys(
        ("schemas", "compiled", "refused", "documents", "unfinished", "not judged", "invalid"), 0
    )
    reasons: dict[str, int] = {}
    rng = random.Random(seed)
    for name, schema in _schemas(folder):
        counts["schemas"] += 1
        try:
            text = compose(json_format(schema, "schema"), thinking=False)
            grammar = grammars.compile(text).result()
        except (InvalidGrammar, PromptError) as error:
            counts["refused"] += 1
            reason = str(error).splitlines()[0].rpartition("JSON schema: ")[2][:60]
            reasons[reason] = reasons.get(reason, 0) + 1
            continue
        counts["compiled"] += 1
        try:
            validator = jsonschema_rs.validator_for(schema)
        except ValueError:  # refers to documents that are not at hand
            counts["not judged"] += 1
            continue
        for _ in range(documents):
            document = _write(model, grammar, rng, longest)
            if document is None:
                counts["unfinished"] += 1
                continue
            counts["documents"] += 1
            if not _is_valid(document, validator):
                counts["invalid"] += 1
                print(f"invalid by {name}: {json.dumps(schema)[:300]}\n  {document[:300]}")
    grammars.close()
    model.close()
    Table([*counts], [[*counts.values()]], title=f"{folder.name}: schemas").print()
    most = sorted(reasons.items(), key=lambda item: -item[1])[:12]
    Table(["refused for", "schemas"], [[reason, count] for reason, count in most], title="refused").print()
    return counts["invalid"]


def _schemas(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if isinstance(content, list):
            for case in content:
                if isinstance(case, dict) and "schema" in case:
                    yield f"{path.name}: {case.get('description')}", case["schema"]
        elif isinstance(content, dict):
            yield path.name, content


def _write(model: Model, grammar: Grammar, rng: random.Random, longest: int) -> str | None:
    """A document of random tokens; None if it does not end within the limit."""
    constraint, tokens = grammar.begin(), grammar.begin().forced()
    constraint.forced()
    while len(tokens) < longest:
        if tokens and tokens[-1] in model.eog_ids:
            return b"".join(model.piece(token, special=False) for token in tokens[:-1]).decode()
        ids = np.flatnonzero(constraint.mask()[: model.n_real])
        ends = np.intersect1d(ids, sorted(model.eog_ids))
        # an end is one of very many tokens: sooner, or few documents would ever have one
        token = int(ends[0]) if ends.size and rng.random() < 0.5 else int(rng.choice(ids))
        try:
            if not constraint.accept(token):
                raise AssertionError(f"token {token} is allowed, and refused")
            tokens += [token, *constraint.forced()]
        except RuntimeError:  # more than the limits allow: a request would fail with an error
            return None
    return None


def _is_valid(document: str, validator: Any) -> bool:
    def finite(text: str) -> float:
        """JSON has no largest number; those who check do."""
        return min(max(float(text), -1e300), 1e300)

    try:
        return bool(validator.is_valid(json.loads(document, parse_float=finite)))
    except ValueError:
        return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=3, help="for each schema (%(default)s)")
    parser.add_argument("--longest", type=int, default=400, help="tokens (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (%(default)s)")
    options = parser.parse_args()
    invalid = schema_suite(options.model, options.folder, options.documents, options.longest, options.seed)
    sys.exit(1 if invalid else 0)
