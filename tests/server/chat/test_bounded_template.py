"""Templates that would never end or take all memory are stopped; the output of others is unchanged."""

import pytest

from qwen_serve.server.chat import bounded_template
from qwen_serve.server.chat.errors import PromptError
from qwen_serve.server.chat.template import ChatTemplate

DOUBLED = """{{% set ns = namespace(s='x') %}}
{{% for _ in range(60) %}}{{% set ns.s = ns.s {} ns.s %}}{{% endfor %}}"""
LARGE = {
    "times": "{{ 'x'*(10**10) }}",
    "times, turned": "{{ 10**10 * 'x' }}",
    "list": "{{ ([1] * 10**10)|length }}",
    "power": "{{ 10**(10**9) }}",
    "plus": DOUBLED.format("+"),
    "tilde": DOUBLED.format("~"),
    "percent": "{{ '%10000000000d' % 1 }}",
    "star": "{{ '%*d' % (10**10, 1) }}",
    "format filter": "{{ '%10000000000d'|format(1) }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "center": "{{ 'x'|center(10**10) }}",
    "center by name": "{{ 'x'|center(width=10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "indent": "{{ 'x\n'|indent(10**10) }}",
    "replace": "{{ ('x'*10**6)|replace('x', 'y'*10**6) }}",
    "replace method": "{{ ('x'*10**6).replace('x', 'y'*10**6) }}",
    "join": "{{ (['x'*10**6] * 10**6)|join }}",
    "join method": "{{ ('x'*10**6).join(['x'] * 10**6) }}",
    "output": "{% for _ in range(9999) %}{{ 'x' * 10**5 }}{% endfor %}",
}
LONG = {
    "loops": "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursion": "{% for n in [60] recursive %}{{ loop([n-1]) if n }}{{ loop([n-1]) if n }}{% endfor %}",
}


@pytest.mark.parametrize("kind", LARGE)
def test_what_becomes_too_large_is_refused(kind: str) -> None:
    with pytest.raises(PromptError, match=r"larger than|writes more than|fills a text"):
        ChatTemplate(LARGE[kind]).render({}, {})


@pytest.mark.parametrize("kind", LONG)
def test_what_takes_too_long_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_template, "SECONDS", 0.2)
    with pytest.raises(PromptError, match="takes more than"):
        ChatTemplate(LONG[kind]).render({}, {})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for x in [1, 2] %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}",
            "1/2False 2/2True ",
        ),
        ("{% for k, v in {'a': 1}.items() %}{{ k ~ v ~ none }}{% endfor %}", "a1None"),
        ("{% for x in messages[::-1] if x %}{{ x }}{% else %}none{% endfor %}", "21"),
        ("{{ 'a-b'|replace('-', '+') }}{{ 'x'|center(3) }}|{{ ['a', 1]|join(', ') }}", "a+b x |a, 1"),
        (
            "{{ 'a\nb'|indent(2) }}{{ '%s: %d' % ('a', 3) }}{{ '%s'|format(1) }}{{ '{}'.format(2) }}",
            "a\n  ba: 312",
        ),
        (
            "{{ 2 ** 10 * 3 % 7 + 1 }}{{ 'ab' * 2 }}{{ ','.join(['a']) }}{{ 'a'.replace('a', 'b') }}",
            "7ababab",
        ),
    ],
)
def test_others_write_what_they_wrote(source: str, text: str) -> None:
    assert ChatTemplate(source).render({"messages": [1, 2]}, {}) == text
