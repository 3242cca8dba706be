"""The clients: their packages, and a check for each of their snippets in docs/clients.md.

A client has an environment of its own (pip requirements, or npm packages). A check is Python code. After a
Python snippet it runs with the snippet's variables. After a snippet in another language ``printed`` is the
snippet's output. A new client needs a section in docs/clients.md and an entry here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ClientProgram:
    """A client, its packages, and its snippets' checks by name."""

    checks: Mapping[str, str]
    pip: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def main_package(self) -> str:
        """The package whose version is shown, without extras."""
        return (self.pip + self.npm)[0].partition("[")[0].partition("=")[0]


PLACES = "('Paris', 'Rome')"
IS_CITY = 'assert city.country in ("France", "Japan", "Peru") and type(city.capital) is bool, city'
SAYS_SOMETHING = "assert printed.strip(), 'it printed nothing'"

CLIENTS: Mapping[str, ClientProgram] = {
    "openai": ClientProgram(
        pip=("openai",),
        checks={
            "chat": "m = reply.choices[0].message\nassert m.content or m.reasoning_content, m\n"
            "assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens",
            "stream": "assert text",
            "structured": IS_CITY,
            "forced_tool": "assert call.function.name == 'weather'\n"
            f"assert arguments['place'] in {PLACES}, arguments",
            "logprobs": "tokens = reply.choices[0].logprobs.content\n"
            "assert len(tokens) == reply.usage.completion_tokens\n"
            "assert all(token.logprob <= 0 and len(token.top_logprobs) == 3 for token in tokens)",
            "responses": "assert reply.output_text and reply.usage.output_tokens",
        },
    ),
    "anthropic": ClientProgram(
        pip=("anthropic",),
        checks={
            "messages": "assert reply.content[0].text and reply.usage.output_tokens\n"
            "assert reply.stop_reason in ('end_turn', 'max_tokens'), reply.stop_reason",
            "stream": "assert text",
            "forced_tool": f"assert call.name == 'weather' and call.input['place'] in {PLACES}, call\n"
            "assert reply.stop_reason == 'tool_use', reply.stop_reason",
            "count_tokens": "assert count.input_tokens > 1",
        },
    ),
    "langchain": ClientProgram(
        pip=("langchain-openai",),
        checks={
            "chat": "assert reply.content and reply.usage_metadata['output_tokens']",
            "with_structured_output": IS_CITY,
            "bind_tools": f"assert call['name'] == 'weather' and call['args']['place'] in {PLACES}, call",
        },
    ),
    "instructor": ClientProgram(pip=("instructor",), checks={"tools": IS_CITY, "json_schema": IS_CITY}),
    "pydantic-ai": ClientProgram(pip=("pydantic-ai-slim[openai]",), checks={"output_type": IS_CITY}),
    "litellm": ClientProgram(
        pip=("litellm",),
        checks={
            "chat": "assert reply.choices[0].message.content and reply.usage.completion_tokens",
            "ollama": "assert reply.choices[0].message.content and reply.usage.completion_tokens",
        },
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    "ollama": ClientProgram(
        pip=("ollama",),
        checks={
            "chat": "message = reply.message\nassert reply.done and reply.eval_count\n"
            "assert message.content or message.thinking, message",
            "structured": IS_CITY,
        },
    ),
    "ollama-js": ClientProgram(npm=("ollama",), checks={"chat": SAYS_SOMETHING}),
    "llm": ClientProgram(
        pip=("llm",),
        checks={
            "prompt": SAYS_SOMETHING,
            "schema": "import json\ncity = json.loads(printed)\n"
            "assert city.keys() == {'country', 'capital'} and city['country'] in ('France', 'Japan'), city",
        },
        environment={"LLM_USER_PATH": "llm", "OPENAI_API_KEY": "none"},
    ),
    "llama-server": ClientProgram(
        pip=("requests",),
        checks={
            "completion": "assert answer['content'] and answer['stop'] and answer['timings']['predicted_n']"
        },
    ),
    "lm-eval": ClientProgram(
        pip=("lm-eval[api]==0.4.11",),
        checks={
            "generate": "assert '|exact_match' in printed, printed[-500:]",
            "loglikelihood": "assert '|acc' in printed, printed[-500:]",
        },
        environment={"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"},
    ),
    "ai-sdk": ClientProgram(
        npm=("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod"),
        checks={
            "generateText": SAYS_SOMETHING,
            "generateObject": "import re\n"
            "assert re.search(r\"country: '(France|Japan|Peru)'\", printed), printed",
            "responses": "assert 'reasoningText: undefined' not in printed, printed\n"
            "assert 'reasoningText' in printed, printed",
        },
    ),
    "opencode": ClientProgram(npm=("opencode-ai",), checks={"run": SAYS_SOMETHING}),
    "codex": ClientProgram(npm=("@openai/codex",), checks={"exec": SAYS_SOMETHING}),
    "continue": ClientProgram(
        npm=("@continuedev/cli",),
        checks={"print": SAYS_SOMETHING},
        environment={"CONTINUE_TELEMETRY_ENABLED": "0"},
    ),
    "claude-code": ClientProgram(
        npm=("@anthropic-ai/claude-code",),
        checks={"print": SAYS_SOMETHING},
        environment={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
    ),
    "qwen-code": ClientProgram(npm=("@qwen-code/qwen-code",), checks={"print": SAYS_SOMETHING}),
    "cline": ClientProgram(npm=("cline",), checks={"print": SAYS_SOMETHING}),
}
