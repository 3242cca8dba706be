"""The values that models write: JSON, or what Python writes in its place."""

import ast
import json
import sys
import warnings
from typing import Any

from pydantic_core import from_json

LONGEST_LITERAL = 64 * 1024
"""Most characters that are read as Python, which takes some milliseconds with the GIL held."""

_WORDS = {"true": True, "false": False, "null": None}


def read_value(text: str) -> Any:
    """The value of a JSON text; also of a list, a tuple or an object in Python's spelling, as in
    `{'dry': True}`. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_no_json, parse_float=finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:
        text = text.strip()
        if text[:1] not in ("[", "{", "(") or len(text) > LONGEST_LITERAL:
            raise
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes in strings
            return _of_python(ast.parse(text, mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"neither JSON nor Python: {error}") from None


def read_object(text: str) -> dict[str, Any] | None:
    """The object that a text spells, as far as it is written: the end may be cut off. None if it spells no
    object."""
    try:
        found = read_value(text) if text.strip() not in ("", "{") else {}
    except ValueError:
        found = _beginning(text) or None  # nothing can be read of a text that says more
    return found if isinstance(found, dict) else None


def _beginning(text: str) -> Any:
    """The value of a JSON text that is cut off; None if it is not."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        if "EOF" not in str(error):
            return None
    try:
        return from_json(text, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        return None


def typed(text: str, types: set[str]) -> Any:
    """The value that `text` spells, if it has one of `types`; otherwise the text itself."""
    if not types or types == {"string"}:
        return text
    word = text.strip()
    # Python's spellings too, since the template writes the scalars of earlier calls that way
    word = {"true": "true", "false": "false", "null": "null", "none": "null"}.get(word.lower(), word)
    try:
        value = read_value(word)
    except ValueError:
        return text
    if isinstance(value, float) and value.is_integer() and types.isdisjoint({"number"}):
        value = int(value)
    if isinstance(value, str):  # a string's own quotes stay, since strings are written as bare text
        inner = text if "string" in types else typed(value, types)
        return text if isinstance(inner, str) else inner
    # for a number's parameter null can only mean none; for a string's parameter it is a word
    fits = not types.isdisjoint(type_names(value)) or (value is None and "string" not in types)
    return value if fits else text


def type_names(value: object) -> set[str]:
    """JSON schema's names for a value's type."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"integer", "number"}
    names = {
        bool: "boolean",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return {names[type(value)]}


def finite(text: str) -> float:
    """Converts a number. 1e999 becomes the largest float: JSON has no limit, but every reader has one."""
    most = sys.float_info.max
    return min(max(float(text), -most), most)


def _of_python(node: ast.expr) -> Any:
    """The JSON value of a literal. Raises ValueError."""
    match node:
        case ast.Constant(value=bool() | int() | str() | None as value):
            return value
        case ast.Constant(value=float() as number):
            return finite(repr(number))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number if isinstance(number, int) else finite(repr(-number))
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_of_python(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_of_python, values), strict=True))
    raise ValueError("no JSON value")


def _no_json(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
