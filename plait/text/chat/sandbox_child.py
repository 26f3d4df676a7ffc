"""The process that reads and renders chat templates: sandboxed, with limits, and nothing worth stealing.

Only the standard library, jinja2 and `confine` are imported. It says in its first line which walls it has,
as a list of JSON. Then it reads one JSON request a line on standard input, and answers each with one JSON
line on standard output: `{"template", "cpu_s", "clock_s"}` → `{"variables"}`, what the template reads;
with `values` and `max_chars`, too, → `{"text"}`. `{"error"}` where the template fails.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.constants
import jinja2.debug
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from plait.text.isolation.confine import confine

_MAX_ERROR = 1000  # characters: a template may write any number of them


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what a trainer learns from; when rendering it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's `tojson`: plain JSON, without HTML's escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> NoReturn:
    """What templates call to refuse a conversation."""
    raise jinja2.TemplateError(message)


class Unfolded(jinja2.compiler.CodeGenerator):
    """Compiles without computing anything: what a template never reaches costs nothing.

    Even with its optimizer off, jinja2 computes constants that are written out.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.optimizer = None  # which `jinja2.meta` would have in any case

    def _output_child_to_const(self, node: jinja2.nodes.Expr, *rest: Any) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, *rest)


class Names(Unfolded, jinja2.meta.TrackingCodeGenerator):
    """Finds the variables that a template reads, as `jinja2.meta` does."""


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that Hugging Face's templates are written for."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[GenerationTag, jinja2.ext.loopcontrols],
    )
    env.code_generator_class = Unfolded
    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


def variables(env: jinja2.sandbox.ImmutableSandboxedEnvironment, source: str) -> list[str]:
    """The variables that a template reads."""
    names = Names(env)
    names.visit(env.parse(source))
    return sorted(names.undeclared_identifiers)


class Templates:
    """Answers requests; the last few templates are kept compiled."""

    def __init__(self) -> None:
        self._env = environment()
        self._compiled: Callable[[str], jinja2.Template] = lru_cache(maxsize=16)(self._env.from_string)

    def answer(self, request: dict[str, Any]) -> dict[str, object]:
        """The answer to one request; every failure of the template is an answer too."""
        # Both end the process: a child outlives neither its time nor its parent.
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        signal.setitimer(signal.ITIMER_REAL, request["clock_s"])
        try:
            template = self._compiled(request["template"])
            if "values" in request:
                return _render(template, request["values"], request["max_chars"])
            return {"variables": variables(self._env, request["template"])}
        except MemoryError:
            return {"error": "it needs more memory than a template may have"}
        except RecursionError:
            return {"error": "it is nested too deeply (maximum recursion depth exceeded)"}
        except jinja2.TemplateSyntaxError as error:
            return {"error": f"it is no Jinja: {_cut(error.message or '')} (line {error.lineno})"}
        except Exception as error:
            return {"error": _cut(str(error)) or type(error).__name__}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)

    def warm_up(self) -> None:
        """Uses everything once: jinja2 imports some of it only then, and behind the walls nothing can be."""
        used = [f"{{{{ 'a b' | {name} }}}}" for name in self._env.filters]
        used += ["{{ lipsum() }}", "{{ strftime_now('%c') }}", "{{ '\\N{BULLET}' }}", "{{ a.b }}", "{% if"]
        for source in used:
            self.answer({"template": source, "values": {}, "max_chars": 1 << 16, "cpu_s": 10, "clock_s": 60})


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_ERROR else text[: _MAX_ERROR - 1] + "…"


def _render(template: jinja2.Template, values: dict[str, object], max_chars: int) -> dict[str, object]:
    pieces, length = [], 0
    for piece in template.generate(**values):
        length += len(piece)
        if length > max_chars:
            return {"error": f"its output is longer than {max_chars} characters"}
        pieces.append(piece)
    return {"text": "".join(pieces)}


def main() -> None:
    """Answers requests until standard input ends."""
    templates = Templates()
    templates.warm_up()
    for ends in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(ends, signal.SIG_DFL)
    walls = confine(int(sys.argv[-1]))
    sys.stdout.write(json.dumps(walls) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(templates.answer(json.loads(line))) + "\n")
        sys.stdout.flush()
