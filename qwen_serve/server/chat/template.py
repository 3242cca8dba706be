"""A Jinja chat template, in the environment that Hugging Face templates are written for."""

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta

from .bounded_template import MOST_CHARACTERS, BoundedEnvironment
from .errors import PromptError

# Names that chat_template_kwargs may not set, besides the environment's own functions.
_OURS = {"messages", "tools", "add_generation_prompt"}


class ChatTemplate:
    """Renders conversations. Compiled once; safe to use from several threads.

    The environment is transformers' (utils/chat_template_utils.py): blocks are trimmed, `tojson` writes plain
    JSON instead of JSON escaped for HTML, `raise_exception` and `strftime_now` exist, `break` and `continue`
    work. It is sandboxed, and limited in time and size.

    Raises PromptError (param `chat_template`) if `source` does not compile.
    """

    def __init__(self, source: str) -> None:
        environment = self._environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise PromptError("chat_template", f"does not compile: {error} (line {error.lineno})") from None
        self._reserved = _OURS | environment.globals.keys()
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        """The variables that the template reads."""

    def render(
        self, variables: dict[str, Any], extra: dict[str, Any], check: Callable[[int], None] = lambda _: None
    ) -> str:
        """Renders with `variables` and the request's `extra` ones. Raises PromptError.

        `check` is called with 0 between the parts of the result, and may raise to stop the work.
        """
        taken = sorted(self._reserved & extra.keys())
        if taken:
            raise PromptError("chat_template_kwargs", f"can not set {', '.join(taken)}")
        parts, size = [], 0
        self._environment.begin()
        for part in self._parts({**extra, **variables}):
            check(0)
            size += len(part)
            if size > MOST_CHARACTERS:
                raise PromptError(
                    "messages", f"the chat template writes more than {MOST_CHARACTERS:,} characters"
                )
            parts.append(part)
        return "".join(parts)

    def _parts(self, variables: dict[str, Any]) -> Iterator[str]:
        context = self._template.new_context(variables)
        try:
            # not `generate`: its error handling creates frames that refer to each other and to all messages
            yield from self._template.root_render_func(context)
        except jinja2.UndefinedError as error:
            raise PromptError("messages", f"the chat template misses something: {error}") from error
        except jinja2.TemplateError as error:
            raise PromptError("messages", str(error)) from error
        except Exception as error:  # any exception of a template was caused by this request
            raise PromptError("messages", f"the chat template can not render them: {error}") from error
        finally:  # breaks the cycle between macros and context
            context.vars.clear()
            context.parent.clear()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
