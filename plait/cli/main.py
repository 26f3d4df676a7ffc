"""`plait`: the command line. Commands are imported when they are called, so help costs nothing.

Every failure is one line on stderr, `plait: …`, and an exit code: 2 wrong usage or options, 3 a model that
cannot be read, 4 memory, 5 an engine that ends again and again, 130 interrupted, 1 anything else. `--debug`
adds the traceback.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import select
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn, TextIO

import click
from click.shell_completion import CompletionItem

from plait.cli.common.help import suggest_word
from plait.cli.common.session import Session
from plait.errors import PlaitError
from plait.resource_limits import is_memory_error, out_of_memory_text
from plait.version import __version__

# name -> what `plait --help` says; the module is plait.cli.<name> (- is _), unless PLACES has another
COMMANDS = {
    "generate": "Continue a text, streamed as it is written.",
    "run": "Talk with a model: fetch it, serve it if no server does, and chat.",
    "chat": "Talk with a model in the terminal.",
    "serve": "Serve a model over the OpenAI API.",
    "cluster": "Serve a model with several engines, over Ray Serve.",
    "ps": "The models of a running server: which are loaded, and what they take.",
    "health": "Whether a running server answers, for health checks.",
    "load": "Have a running server load a model.",
    "stop": "Have a running server unload a model.",
    "run-batch": "Answer a file of requests, in OpenAI's batch format.",
    "info": "What a model is: layers, sources of every value, memory.",
    "families": "Every family of models that is served, and the kinds that are refused.",
    "pull": "Fetch a model from the Hub, only the files it needs.",
    "list": "The models of the Hub on this disk.",
    "rm": "Remove models of the Hub from this disk.",
    "convert": "Write a model as GGUF or safetensors, quantized or as it is.",
    "doctor": "What this machine has, which kernels run on it, and what is wrong.",
    "decode": "Token ids to text.",
    "tokenize": "Text to token ids.",
    "warmup": "Compile what a model needs, so that it starts fast the next time.",
    "cache": "What is kept on this disk to start faster; `plait cache clean` removes it.",
    "verify": "Check that a reply depends on its request alone, to the bit.",
    "logs": "What servers that `plait run` started have written.",
    "config": "What `plait serve` would run with, and where each value comes from.",
    "upgrade-check": "Which version is installed, and whether there is a newer one.",
    "completion": "Print the script that has a shell complete commands and options.",
    "bench": "How fast a model and its ops are here; checked, then timed.",
}
# Several commands in one module.
PLACES = {"decode": "tokenize", "list": "hub", "pull": "hub", "rm": "hub"}
PLACES |= dict.fromkeys(("ps", "load", "stop"), "resident")
# What other programs call them.
ALSO = {"start": "serve", "server": "serve", "complete": "generate", "quantize": "convert"}
ALSO |= {"download": "pull", "fetch": "pull", "ls": "list", "models": "list", "remove": "rm", "delete": "rm"}
ALSO |= {"upgrade": "upgrade-check", "update": "upgrade-check", "log": "logs", "unload": "stop"}
EXIT_FAULT, EXIT_USAGE, EXIT_MODEL, EXIT_MEMORY, EXIT_UNWRITTEN, EXIT_INTERRUPTED = 1, 2, 3, 4, 120, 130
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}  # what a disk refuses to take
UNREAD_S = 2.0  # for the reader of stderr to take the last line


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one only to run it or to show its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = import_module(f"plait.cli.{PLACES.get(name, name).replace('-', '_')}")
        return next(c for c in vars(module).values() if isinstance(c, click.Command) and c.name == name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            hint = f"; did you mean {ALSO[name]}?" if name in ALSO else suggest_word(name, COMMANDS)
            raise click.UsageError(f"there is no command {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names of commands, without importing one; click's own way imports them all."""
        names = [CompletionItem(n, help=text) for n, text in COMMANDS.items() if n.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`plait COMMAND --help` lists the options of a command.",
)
@click.version_option(__version__, prog_name="plait", message="%(prog)s %(version)s")
def cli() -> None:
    """Plait runs language models with layers of mixed kinds: Mamba2, MLA, MoE, attention.

    A model is a directory, a .safetensors or .gguf file, or a name on the Hub. Its files say what it is.

    \b
    plait run org/name                      fetch a model, serve it and talk with it
    plait chat ./model                      talk with one on this disk
    plait serve ./model                     serve it, with a page to chat at http://127.0.0.1:8080
    plait generate -m ./model -p "Once"     continue a text
    plait info ./model                      what it is and what it needs
    """
    # Here it is once for each command line, whatever its command is, and before that reads its options.
    if any(name.startswith("PLAIT_") for name in os.environ):
        from plait.cli.common.unread_flags import warn_of_variables

        warn_of_variables(os.environ)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (sys.argv if None) and return its exit code; every error has been printed."""
    session = Session()
    try:
        code = cli.main(args=arguments, prog_name="plait", standalone_mode=False, obj=session)
        sys.stdout.flush()
    except BaseException as error:
        code = report(error, session)
    return code if isinstance(code, int) else 0


def report(error: BaseException, session: Session) -> int:
    """Print what went wrong, shortly, and return the exit code."""
    match error:
        case SystemExit(code=int(code)):
            return code
        case click.exceptions.Exit(exit_code=code):
            return code
        case click.UsageError() if type(error).__name__ == "NoArgsIsHelpError":  # from click 8.2 on
            print(error.format_message(), file=sys.stderr)
            return EXIT_USAGE
        case BrokenPipeError():
            # The reader has gone (`| head`), so neither the rest nor an error message is of use.
            _discard_stdout()
            return EXIT_FAULT
        case OSError(filename=None, errno=number) if number in FULL:
            _discard_stdout()
        case KeyboardInterrupt() | click.Abort():
            return EXIT_INTERRUPTED
    if session.debug:
        traceback.print_exception(error)
    message, code = explain(error)
    if _is_read(sys.stderr):
        print(f"plait: {message}", file=sys.stderr)
    return code


def _discard_stdout() -> None:
    """Have what is still in its buffer lead nowhere, so that the end of the process does not fail again."""
    with suppress(OSError, ValueError):  # it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_read(stream: TextIO | None) -> bool:
    """Whether a line can be written; a pipe that is full must not keep a process from its end."""
    try:
        return stream is not None and bool(select.select((), (stream,), (), UNREAD_S)[1])
    except (OSError, ValueError):  # it is no file
        return True


def explain(error: BaseException) -> tuple[str, int]:
    """(one line, exit code) for any exception."""
    match error:
        case PlaitError():
            return str(error), error.exit_code
        case click.ClickException():
            context = getattr(error, "ctx", None)
            hint = f"{_suggest_option(error)} (see `{context.command_path} --help`)" if context else ""
            return error.format_message().rstrip(" \n.") + hint, error.exit_code
        case _ if is_memory_error(error):
            return out_of_memory_text(error), EXIT_MEMORY
        case RuntimeError() if "can't start new thread" in str(error):
            text = "no thread can be started: this user, or the container, may have no more"
            return f"{text} (ulimit -u, pids.max); raise that limit", EXIT_MEMORY
        case OSError(filename=name) if name is not None:
            return f"{name}: {error.strerror}", EXIT_MODEL
        case OSError(errno=number) if number in FULL:
            return f"stdout, or a file, cannot be written: {error.strerror}", EXIT_FAULT
        case ModuleNotFoundError(name=str(name)) if not name.startswith("plait"):
            text = (
                f"the package {name.partition('.')[0]} is not installed; `pip install plait-engine` brings it"
            )
            return f"{text}, and docs/deploy.md has PyTorch's build for CPUs", 1
    # torch is not imported here to ask: its allocators say what they are.
    text = " ".join(str(error).split())
    if type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in text:
        return f"out of memory: {text[:200]}; choose a smaller --max-model-len or --max-num-seqs", EXIT_MEMORY
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    fault = f"a fault of Plait or of a plug-in{where}; --debug shows the traceback"
    return f"{type(error).__name__}: {text} ({fault})", EXIT_FAULT


def _suggest_option(error: click.ClickException) -> str:
    """The option behind which a text belongs that was given without one."""
    context = getattr(error, "ctx", None)
    if context is None or "unexpected extra argument" not in error.format_message():
        return ""
    known = {name for param in context.command.params for name in param.opts}
    option = next((name for name in ("--prompt", "--text", "--ids") if name in known), None)
    return f"; give it with {option}" if option else ""


def escape_unknown(stream: TextIO | None) -> None:
    """Have it escape what its encoding lacks, as stderr does: a reply may have any character."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


def leave(code: int) -> NoReturn:
    """End the process, with everything that Python promises to do at its end.

    Where torch was loaded, memory and modules are left to the system then. Taking them apart one by one would
    let a caller wait a tenth of a second for nothing.
    """
    is_watched = sys.gettrace() or sys.getprofile()  # by a debugger or profiler that wants to go on behind it
    if "torch" not in sys.modules or is_watched:
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]  # as a child of multiprocessing ends, step for step
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError:  # its reader has gone; Python's own end has this code for it
        code = code or EXIT_UNWRITTEN
    os._exit(code)


def main() -> None:
    """The console script."""
    # Threads of numpy's own would have nothing to do, and take a core while numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    escape_unknown(sys.stdout)
    leave(run())


if __name__ == "__main__":
    main()
