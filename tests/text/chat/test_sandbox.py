"""Hostile templates harm no request but their own."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.errors import BadTemplate, CapacityError
from plait.fair_queue import current_client
from plait.text.chat.sandbox import Sandbox, SandboxLimits, TemplateEnded
from plait.text.chat.sandbox_child import Templates
from plait.text.isolation import child_process
from tests.patience import PATIENCE_S

DOUBLING = (
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
)
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    # Long enough that a busy machine meets the limit under test, not the clock.
    box = Sandbox(SandboxLimits(timeout_s=30.0, clock_s=60.0, max_chars=100_000, wait_s=120.0))
    yield box
    box.close()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (DOUBLING, "memory"),
        ("{{ 'x' * 10000000000 }}", "memory"),
        ("{% for i in range(99999) %}xxxxxxxxxx{% endfor %}", "longer than 100000 characters"),
        ("{{ range(1000000) | list }}", "Range too big"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{% if", "end of"),
        ("{% include 'x' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion|process|memory"),
    ],
)
def test_hostile_templates_are_refused(sandbox: Sandbox, template: str, says: str) -> None:
    with pytest.raises(BadTemplate, match=says):
        sandbox.render(template, {"messages": []})
    assert sandbox.render("{{ x }}", {"x": "still here"}) == "still here"


def test_an_endless_template_is_stopped_by_the_clock() -> None:
    box = Sandbox(SandboxLimits(timeout_s=1.0, clock_s=120.0))
    try:
        with pytest.raises(BadTemplate, match="within 1 s"):
            box.render(ENDLESS, {})
        assert box.render("still here", {}) == "still here"
    finally:
        box.close()


def test_the_doubling_bomb_does_not_grow_this_process(sandbox: Sandbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadTemplate):
        sandbox.render(DOUBLING, {})
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 * 1024


def test_the_environment_is_that_of_hugging_face(sandbox: Sandbox) -> None:
    template = (
        "{% for i in [1, 2, 3] %}\n  {% if i == 2 %}{% continue %}{% endif %}\n{{ i }}\n{% endfor %}\n"
        "{% generation %}{{ {'é': '<b>', 'z': 1} | tojson }}{% endgeneration %}|{{ [1] | tojson(indent=1) }}"
        "|{{ strftime_now('%Y') | length }}"
    )
    text = sandbox.render(template, {})
    assert text == '1\n3\n{"é": "<b>", "z": 1}|[\n 1\n]|4'


def test_what_comes_back_is_what_went_in(sandbox: Sandbox) -> None:
    text = 'a\n"b"\\ é 你好 😀 \x00 \u2028 </script>'
    assert sandbox.render("{{ t }}", {"t": text}) == text


def test_long_conversations_pass_through_the_pipes() -> None:
    box = Sandbox()
    text = "é" * 2_000_000
    assert box.render("{{ t }}", {"t": text}) == text
    box.close()


def test_the_variables_a_template_reads_are_known(sandbox: Sandbox) -> None:
    source = "{% if thinking is defined %}{{ thinking }}{% endif %}{% for m in messages %}{{ m }}{% endfor %}"
    assert sandbox.read(source) == {"thinking", "messages"}


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "import sys; sys.exit(7)",
            "ended with exit code 7 before it was ready; look for a limit",
        ),
        ("import no_such_module_here", "ended with exit code 1 before it was ready"),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL before it was ready"),
        (
            "print('no json', flush=True); input()",
            r"wrote no first line that can be read \(JSONDecodeError\)",
        ),
        ("input()", r"did not start within 0\.5 s"),
    ],
)
def test_a_child_that_does_not_come_up_says_why_at_once(
    monkeypatch: pytest.MonkeyPatch, code: str, says: str
) -> None:
    monkeypatch.setattr(child_process, "_RUN", code.replace("{", "{{").replace("}", "}}"))
    box = Sandbox(SandboxLimits(start_s=0.5 if code == "input()" else PATIENCE_S))
    with pytest.raises(CapacityError, match=f"^the process that renders chat templates {says}"):
        box.start()
    box.close()


def test_a_killed_child_is_replaced(sandbox: Sandbox) -> None:
    sandbox.start()
    child = sandbox._children[0]
    os.kill(child._process.pid, 9)
    child._process.wait()
    assert sandbox.render("ok", {}) == "ok"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_signals_for_the_whole_group_end_no_child(sandbox: Sandbox, number: int) -> None:
    sandbox.start()
    process = sandbox._children[0]._process
    os.kill(process.pid, number)
    assert sandbox.render("ok", {}) == "ok"
    assert sandbox._children[0]._process is process


def test_a_child_ended_from_outside_condemns_no_template() -> None:
    box = Sandbox(SandboxLimits(timeout_s=300.0, clock_s=600.0))
    box.start()
    killer = threading.Thread(target=_kill_when_busy, args=(box._children[0]._process.pid,))
    killer.start()
    try:
        with pytest.raises(CapacityError, match="ended by the system; try again"):
            box.render(POWER, {"messages": [{"content": "x"}]})
        assert box.render("ok", {}) == "ok"
    finally:
        killer.join()
        box.close()


def _kill_when_busy(pid: int) -> None:
    def ticks() -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])

    before = ticks()
    while ticks() < before + 10:
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)


def test_a_process_that_cannot_start_is_no_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    box = Sandbox()
    for use in (box.start, lambda: box.render("ok", {})):
        with pytest.raises(CapacityError, match=r"renders chat templates: .*Too many open files; try again"):
            use()


def test_the_text_of_an_error_is_bounded(sandbox: Sandbox) -> None:
    with pytest.raises(BadTemplate) as caught:
        sandbox.render("{{ raise_exception('x' * 5000000) }}", {})
    assert 1000 < len(str(caught.value)) < 1100
    with pytest.raises(BadTemplate) as caught:
        sandbox.read("{% " + "x" * 100000 + " %}")
    assert len(str(caught.value)) < 1100


def test_threads_take_turns(sandbox: Sandbox) -> None:
    answers: dict[int, str] = {}

    def render(n: int) -> None:
        answers[n] = sandbox.render("{{ n }}", {"n": n})

    threads = [threading.Thread(target=render, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: str(n) for n in range(16)}


def test_a_rendering_that_gets_no_turn_is_refused() -> None:
    box = Sandbox(SandboxLimits(wait_s=0.01))
    try:
        with box._turns.take(0, ""), pytest.raises(CapacityError, match="of others"):
            box.render("ok", {})
        assert box.render("ok", {}) == "ok"
    finally:
        box.close()


def test_close_reaps_the_child_and_may_be_repeated() -> None:
    box = Sandbox()
    box.start()
    process = box._children[0]._process
    box.close()
    box.close()
    assert process.returncode is not None
    assert box.render("again", {}) == "again"
    box.close()


def test_a_forgotten_sandbox_leaves_no_child() -> None:
    box = Sandbox()
    box.start()
    process = box._children[0]._process
    del box
    gc.collect()
    assert process.returncode is not None


def test_the_child_ends_with_its_parent() -> None:
    script = (
        "import sys; from plait.text.chat.sandbox import Sandbox; import os\n"
        "box = Sandbox(); box.start(); print(box._children[0]._process.pid, flush=True); os._exit(0)"
    )
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    pid = int(run.stdout)
    for _ in range(100):
        if not _running(pid):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} outlived its parent")


def _running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


POWER = "{% if messages[0].content == 'x' %}{{ 9**(9**9) }}{% endif %}{{ messages[0].content }}"


@pytest.mark.parametrize(
    "never",
    [
        "{{ 9**(9**9) }}",
        "{{ ('a' * 3000000000) | length }}",
        "{% set n = 9**(9**9) %}",
        "{% for i in [9**(9**9)] %}{% endfor %}",
        "{{ 'a'.replace('a', 'a' * 3000000000) }}",
    ],
)
def test_what_a_template_never_reaches_costs_nothing(sandbox: Sandbox, never: str) -> None:
    source = f"{{% if messages %}}{{{{ messages }}}}{{% else %}}{never}{{% endif %}}"
    assert "messages" in sandbox.read(source)
    assert sandbox.render(source, {"messages": ["hi"]}) == "['hi']"


def test_a_computation_without_end_ends_its_own_request_alone() -> None:
    box = Sandbox(SandboxLimits(timeout_s=0.5, clock_s=120.0))
    try:
        assert box.render(POWER, {"messages": [{"content": "hi"}]}) == "hi"
        with pytest.raises(TemplateEnded, match=r"within 0\.5 s"):
            box.render(POWER, {"messages": [{"content": "x"}]})
        assert box.render(POWER, {"messages": [{"content": "hi"}]}) == "hi"
    finally:
        box.close()


def test_a_machine_that_is_too_busy_is_not_the_fault_of_a_template() -> None:
    box = Sandbox(SandboxLimits(timeout_s=60.0, clock_s=0.2))
    box.start()
    try:
        with pytest.raises(CapacityError, match="busy"):
            box.render(POWER, {"messages": [{"content": "x"}]})
    finally:
        box.close()


@pytest.mark.parametrize("source", ["{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "{% if x %}" * 3000])
def test_deep_nesting_is_refused_in_words(sandbox: Sandbox, source: str) -> None:
    with pytest.raises(BadTemplate, match="nested too deeply"):
        sandbox.read(source)


def test_another_asker_is_served_while_one_computes() -> None:
    box = Sandbox(SandboxLimits(timeout_s=300.0, clock_s=600.0))
    ended = list[CapacityError]()

    def burn() -> None:
        current_client.set("greedy")
        try:
            box.render(POWER, {"messages": [{"content": "x"}]})
        except CapacityError as error:  # its process ends, which is no fault of the template
            ended.append(error)

    thread = threading.Thread(target=burn)
    thread.start()
    assert box.render("{{ x }}", {"x": "served"}) == "served"
    assert not ended
    while 0 not in box._children or 1 not in box._children:
        assert box.render("{{ x }}", {"x": "served"}) == "served"
    box.close()
    thread.join()
    assert len(ended) == 1


def test_the_child_says_which_walls_it_has(sandbox: Sandbox) -> None:
    walls = sandbox.start()
    assert {"limit of memory", "limit of open files", "limit of file size"} <= set(walls)


def test_everything_that_jinja_offers_works_behind_the_walls(sandbox: Sandbox) -> None:
    """What jinja2 imports at its first use cannot be imported there any more."""
    templates = Templates()
    names = sorted(set(templates._env.filters) - {"random"})
    sources = [f"{{{{ x | {name} }}}}" for name in names]
    sources += [f"{{{{ x is {name} }}}}" for name in templates._env.tests]
    sources += ["{{ '\\N{BULLET}' }}", "{{ 'a' 'b' | wordwrap(1) }}", "{{ lipsum() is string }}"]
    sources += ["{{ cycler(1, 2).next() }}{{ joiner() }}{{ dict(a=1) }}", "{{ nothing.at }}", "{{ 1 / 0 }}"]
    for source in sources:
        for x in ("a b <c>", [{"b": 1, "a": [2.5]}], {"k": "v"}, 3):
            request = {"template": source, "values": {"x": x}, "max_chars": 10_000}
            wanted = templates.answer({**request, "cpu_s": 60, "clock_s": 120})
            try:
                found = {"text": sandbox.render(source, {"x": x})}
            except BadTemplate as error:
                found = {"error": str(error).removeprefix("the chat template refused: ")}
            assert _without_addresses(found) == _without_addresses(wanted), source


def _without_addresses(found: object) -> str:
    return re.sub("0x[0-9a-f]+", "", str(found))


def test_no_process_but_the_child_imports_jinja() -> None:
    script = """
import sys
import plait.server.app, plait.frontend.frontend, plait.worker.client, plait.loading.text_side
from plait.text.tokenizers.builtin import builtin_tokenizer
from plait.text.chat.jinja import JinjaTemplate
sources = {"default": "{{ messages[0].content }}{{ enable_thinking }}"}
template = JinjaTemplate("test", sources, builtin_tokenizer("cl100k_base"), {})
template.start()
assert "enable_thinking" in template.variables
assert template.text([{"role": "user", "content": "hi"}]) == "hi"
template.close()
print([name for name in sys.modules if name.startswith("jinja2")])
"""
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
