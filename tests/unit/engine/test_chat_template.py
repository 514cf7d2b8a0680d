"""Chat templates: what models use works, what an attacker writes executes nothing and ends in one sentence."""

from __future__ import annotations

import sys
import time

import pytest

from worker.engine.chat_template import RENDER_LIMIT_S, ChatTemplate
from worker.engine.errors import ChatTemplateError

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]


def render(source: str, **options: bool) -> str:
    return ChatTemplate(source, bos="<s>", eos="</s>").render(TURNS, **options)


def test_what_templates_of_models_do() -> None:
    source = """{{ bos_token }}{%- for m in messages %}
{%- if m.role not in ['user', 'assistant'] %}{{ raise_exception('bad role') }}{% endif %}
{%- if loop.first %}[{% endif %}{{ m['role'] | upper }}:{{ m.content | trim }}{{ eos_token }}
{%- if loop.last %}]{% break %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}>{% endif %}"""
    assert render(source) == "<s>[USER:Hi</s>ASSISTANT:Yes?</s>]>"
    assert render(source, add_generation_prompt=False).endswith("]")
    assert render("{{ {'a': 'é'} | tojson }}") == '{"a": "é"}'
    assert render("{{ 'a-b-c' | replace('-', '+') }}{{ 'x.y'.replace('.', '') }}{{ ', '.join(['a', 'b']) }}") == (
        "a+b+cxya, b"
    )
    assert render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}")
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert render("{% if tools is none %}no{% endif %}") == "no"


def test_bos_and_eos_are_defined_where_the_model_has_none() -> None:
    assert ChatTemplate("{{ bos_token + eos_token }}|").render(TURNS) == "|"


@pytest.mark.parametrize(
    "source, words",
    [
        ("a\nb\n{{ raise_exception('no system role') }}", r"chat template line 3: no system role"),
        ("\n{{ messages[7].content }}", r"chat template line 2: .* has no"),
        ("{% for m in messages %}\n{{ m.content + 1 }}{% endfor %}", r"chat template line 2: "),
        ("ok\n{% if %}", r"chat template line 2: "),
        ("{{ 1 / 0 }}", r"chat template line 1: division by zero"),
        ("{{ nothing() }}", r"chat template line 1: 'nothing' is undefined"),
    ],
)
def test_a_template_that_fails_names_its_line(source: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words) as caught:
        render(source)
    assert "\n" not in str(caught.value)


HOSTILE = [
    # CVE-2024-34359 and its relatives: walk from a literal to os.
    "{% for x in ().__class__.__base__.__subclasses__() %}{% if 'warning' in x.__name__ %}"
    "{{ x()._module.__builtins__['__import__']('os').popen('touch PWNED').read() }}{% endif %}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('touch PWNED').read() }}",
    "{{ joiner.__init__.__globals__['__builtins__'] }}",
    "{{ raise_exception.__globals__['os'].system('touch PWNED') }}",
    "{{ self._TemplateReference__context.environment.loader }}{{ self.__init__.__globals__ }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ (messages | attr('__class__')).__base__ }}",
    "{{ messages | map(attribute='__class__') | list | first }}{{ 1 / 0 }}",
    "{{ '{0.__class__.__base__}'.format(messages) }}",
    "{{ '{0.__class__}' | format(messages) }}",
    "{{ '%s' % messages }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.getcwd() }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ lipsum.__globals__ }}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_execute_nothing(source: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ChatTemplateError):
        render(source)
    assert list(tmp_path.iterdir()) == []


BOMB = "{% set ns = namespace(a=[1]) %}{% for i in range(30) %}{% set ns.a = [ns.a, ns.a, ns.a, ns.a] %}{% endfor %}"
GREEDY = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "{{ 'x' * 999999999 }}",
    "{{ 999999999 * 'x' }}",
    "{{ [0] * 999999999 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ 2 ** 99999999 }}",
    "{{ 'x' | center(999999999) }}",
    "{{ 'x'.center(999999999) }}",
    "{{ 'x'.ljust(999999999) }}",
    "{{ '{:>999999999}'.format('x') }}",
    "{{ '%999999999d' % 1 }}",
    "{{ 'a' | indent(999999999) }}",
    "{{ {'a': 1} | tojson(indent=999999999) }}",
    "{% set s = 'a' * 4000 %}{{ s.replace('a', s) }}",
    "{% set s = 'a' * 4000 %}{{ s | replace('a', s) }}",
    "{% set s = 'a' * 4000 %}{{ s.join([s] * 4000) }}",
    "{% set s = 'a' * 4000 %}{{ ([s] * 4000) | join }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% set ns.s = x %}{% endfor %}",
    "{{ range(999999999) | list }}",
    "{{ [1] | batch(999999999, 0) | list }}",
    "{{ ([[0] * 4000] * 4000000) | sum(start=[]) }}",
    BOMB + "{{ ns.a }}",
    BOMB + "{{ ns.a | tojson }}",
    BOMB + "{{ ns.a | string }}",
    BOMB + "{{ '' ~ ns.a }}",
    BOMB + "{{ [ns.a] | join }}",
]


@pytest.mark.parametrize("source", GREEDY)
def test_greedy_templates_are_stopped(source: str) -> None:
    started = time.monotonic()
    with pytest.raises(ChatTemplateError):
        render(source)
    assert time.monotonic() - started < RENDER_LIMIT_S + 20


def test_the_trace_function_is_put_back() -> None:
    before = sys.gettrace()
    render("{{ 1 }}")
    with pytest.raises(ChatTemplateError):
        render("{{ 1 / 0 }}")
    assert sys.gettrace() is before
