"""Published schemas: those that compile give only valid documents."""

import json
import re
from pathlib import Path

import pytest

from tests.server.schema_suite import schema_suite


def test_documents_of_random_tokens_are_valid(
    nano_f32: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schemas = [{"type": "integer", "maximum": 20, "minimum": 3}, {"not": {}}, {"enum": ["a", None]}]
    cases = [{"description": str(n), "schema": schema} for n, schema in enumerate(schemas)]
    (tmp_path / "suite.json").write_text(json.dumps(cases))
    assert schema_suite(nano_f32, tmp_path, documents=8, longest=400, seed=1) == 0
    out = capsys.readouterr().out
    assert re.search(r"\b3 +2 +1\b", out), out
    assert "Unimplemented" in out
