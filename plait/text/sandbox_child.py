"""The process that renders chat templates: no network of imports, a memory limit, and nothing worth stealing.

Run as a script, alone (`python -I sandbox_child.py LIMIT`); only `environment` is imported, to parse with. It
reads one JSON request a line on standard input and answers each with one JSON line on standard output:
`{"template", "values", "max_chars", "timeout_s"}` → `{"text", "variables"}` or `{"error"}`.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a trainer learns from; when rendering it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def to_json(
    value: Any,
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


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that Hugging Face's templates are written for."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


Compiled = tuple[jinja2.Template, list[str]]


def compiler(env: jinja2.sandbox.ImmutableSandboxedEnvironment) -> Callable[[str], Compiled]:
    """Source → (template, the variables it reads); the last few sources are kept."""

    @lru_cache(maxsize=16)
    def compiled(source: str) -> Compiled:
        variables = jinja2.meta.find_undeclared_variables(env.parse(source))
        return env.from_string(source), sorted(variables)

    return compiled


def render(compiled: Callable[[str], Compiled], request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request; every failure of the template is an answer too."""
    signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
    try:
        template, variables = compiled(request["template"])
        pieces, length = [], 0
        for piece in template.generate(**request["values"]):
            length += len(piece)
            if length > request["max_chars"]:
                return {"error": f"its output is longer than {request['max_chars']} characters"}
            pieces.append(piece)
        return {"text": "".join(pieces), "variables": variables}
    except MemoryError:
        return {"error": "it needs more memory than a template may have"}
    except Exception as error:
        return {"error": str(error) or type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """Answers requests until standard input ends."""
    compiled = compiler(environment())
    memory = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The default action of SIGALRM ends the process, so a child outlives neither its time nor its parent.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(render(compiled, json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
