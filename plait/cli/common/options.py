"""What commands read: flags, engine options in the text of one flag, and stdin.

The flags of the engine and the server are generated from the dataclasses that hold the defaults.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args, get_origin

import click
from click.core import ParameterSource

from plait.cli.common.help import path_completion
from plait.cli.common.session import Session, log_to_stderr
from plait.cli.common.unread_flags import variable_name
from plait.config import DAY_S, DEVICE, EngineConfig, ServerConfig
from plait.engine.adapters import parse_named
from plait.errors import ConfigError
from plait.option_fields import option_types
from plait.request import SAMPLING, SamplingParams

if TYPE_CHECKING:
    from click import ParamType
else:

    class ParamType(click.ParamType):  # click's own takes no parameter before 8.4
        def __class_getitem__(cls, kind: object) -> type:
            return cls


Command = TypeVar("Command", bound=Callable[..., object])
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SERVER_URL = "http://127.0.0.1:8080"
# Their help names the variable: a command line would show the key to every user of the machine.
SECRET = {"api_key", "admin_key", "mcp_token"}
METAVARS = {"set": "KEY=VALUE", "plugins": "FILE.py"}
BYTES_FIELDS = {
    *("memory_limit", "swap_memory", "max_body_bytes", "cache_disk_limit", "cache_disk_bandwidth"),
    *("store_limit", "models_memory"),
}
SECONDS_FIELDS = {"store_max_age"}
# Of no use in a terminal, where a reply is one text.
_NOT_TYPED = {"n", "best_of", "logit_bias", "logprobs", "prompt_logprobs", "stop_token_ids"} | {
    *("include_stop_str_in_output", "skip_special_tokens", "logit_bias_strings", "allowed_token_ids"),
    *("truncate_prompt_tokens", "use_beam_search", "beam_width", "length_penalty", "early_stopping"),
}
SAMPLING_HELP = {name: field.words for name, field in SAMPLING.items() if name not in _NOT_TYPED}


class Decorator(Protocol):
    """Adds options to a command, which stays what it is."""

    def __call__(self, command: Command, /) -> Command: ...


class Bytes(ParamType[int]):
    """A number of bytes: 1073741824, 512MiB, 4G (powers of 1024)."""

    name = "bytes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(value).strip(), re.IGNORECASE)
        if match is None:
            self.fail(f"{value!r} is not a number of bytes; write 1073741824, 512MiB or 4GiB", param, ctx)
        return int(float(match[1]) * UNITS[match[2].upper()])


class Seconds(ParamType[int]):
    """A duration: 3600, 90m, 12h, 30d."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d{1,12})\s*([smhd]?)", str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no duration; write seconds, 90m, 12h or 30d", param, ctx)
        return int(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": DAY_S}[match[2]]


class TokenIds(ParamType[tuple[int, ...]]):
    """Token ids, with commas or spaces between them, brackets or not: "1,2,3"."""

    name = "ids"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
        for part in parts:
            if not re.fullmatch(r"\d+", part):
                self.fail(f"{part!r} is not a token id; write them like 1,2,3", param, ctx)
        return tuple(int(part) for part in parts)


class FieldOption(click.Option):
    """A flag of EngineConfig or ServerConfig, which the environment may set, too."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """What the environment has. Kubernetes sets PLAIT_PORT=tcp://10.0.0.1:8080 in every container next to
        a service that is called plait: that is no option."""
        value = super().resolve_envvar_value(ctx)
        return None if self.name == "port" and value and value.startswith("tcp://") else value

    def type_cast_value(self, ctx: click.Context, value: object) -> object:
        """As click does it; an error says which variable is wrong."""
        try:
            return super().type_cast_value(ctx, value)
        except click.BadParameter as error:
            name = self.name or ""
            if ctx.get_parameter_source(name) is not ParameterSource.ENVIRONMENT:
                raise
            text = f"{error.message.rstrip('.')} (of {variable_name(name)})."
            raise click.BadParameter(text, ctx, self) from error


class Device(ParamType[str]):
    """auto, cpu, cuda or cuda:N."""

    name = "device"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not DEVICE.fullmatch(value):
            self.fail(f"{value!r} is not one of auto, cpu, cuda, cuda:N", param, ctx)
        return str(value)


def flag(cls: type, field: Field[object], text: str) -> Decorator:
    """One click option for one field of a dataclass; its default stays the dataclass's own."""
    hint, _ = option_types(cls)[field.name]
    name = "--" + field.name.replace("_", "-")
    default = None if field.default is MISSING else field.default
    shown: dict[str, Any] = {
        "help": text,
        "default": default,
        "show_default": default not in (None, (), False),
        "show_envvar": field.name in SECRET,
    }
    if cls is not SamplingParams:  # those belong to a request
        shown |= {"envvar": variable_name(field.name), "cls": FieldOption}
    names = (name, *field.metadata.get("also", ()), field.name)
    if field.name in BYTES_FIELDS:
        return click.option(*names, type=Bytes(), metavar="BYTES", **shown)
    if field.name in SECONDS_FIELDS:
        return click.option(*names, type=Seconds(), metavar="DURATION", **shown)
    if field.name == "device":
        return click.option(*names, type=Device(), **shown)
    if get_origin(hint) is Literal:
        return click.option(*names, type=click.Choice(get_args(hint)), **shown)
    if get_origin(hint) is tuple:
        return click.option(*names, multiple=True, metavar=METAVARS.get(field.name, "TEXT"), **shown)
    if hint is bool:
        switch = f"{name}/--no-{name.removeprefix('--')}" if field.default is True else name
        return click.option(switch, *names[1:], is_flag=True, **shown)
    return click.option(*names, type=hint, **shown)


def options(decorators: Sequence[Decorator]) -> Decorator:
    """Several options as one decorator, listed in help in their order."""

    def apply(command: Command) -> Command:
        for decorate in reversed(decorators):
            command = decorate(command)
        return command

    return apply


def config_options(cls: type, *, without: Sequence[str] = ()) -> Decorator:
    """A flag for every field of EngineConfig or ServerConfig."""
    return options([flag(cls, f, f.metadata["help"]) for f in fields(cls) if f.name not in without])


def engine_options(*, without: Sequence[str] = ()) -> Decorator:
    """Every EngineConfig flag, and `--cpu` for `--device cpu`."""
    text = "use the CPU, also when there is a GPU; as --device cpu"
    cpu = click.option("--cpu", is_flag=True, help=text)
    return options([cpu, config_options(EngineConfig, without=without)])


def sampling_options(*, max_tokens: int | None) -> Decorator:
    """The SamplingParams that a terminal needs; what is not given stays the model's choice."""
    names = {f.name: f for f in fields(SamplingParams)}
    rest = [
        flag(SamplingParams, names[name], text)
        for name, text in SAMPLING_HELP.items()
        if name != "max_tokens"
    ]
    shown = max_tokens or "the rest of the context"
    first = click.option(
        "--max-tokens", type=int, default=max_tokens, help=f"{SAMPLING_HELP['max_tokens']} [default: {shown}]"
    )
    return options([first, *rest])


def model_option(*, required: bool = True) -> Decorator:
    """The model, as an argument or as `--model`; the command gets one `model`."""
    text = "a directory, a .safetensors or .gguf file, or a Hub id"

    def merge(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        given = ctx.params.pop("model_argument", None) or value
        if required and not given:
            raise click.UsageError(f"name a model with --model: {text}", ctx)
        return given

    shared: dict[str, Any] = {"shell_complete": path_completion}
    argument = click.argument("model_argument", metavar="[MODEL]", required=False, is_eager=True, **shared)
    named = click.option("--model", "-m", metavar="MODEL", callback=merge, help=text, **shared)
    return options([argument, named])


def server_options() -> Decorator:
    """`--url` and `--api-key`: which server a command asks."""
    key = "the key that it is sent"
    api_key = click.option("--api-key", envvar="PLAIT_API_KEY", show_envvar=True, help=key)
    return options([url_option(), api_key])


def url_option() -> Decorator:
    """`--url` alone."""
    text = "the server"
    return click.option(
        "--url", default=SERVER_URL, show_default=True, envvar="PLAIT_URL", show_envvar=True, help=text
    )


def config_file_option() -> Decorator:
    """`--config`, a file of options."""
    text = "a TOML file of these options, in [server], [engine] and [models.NAME]"
    return click.option("--config", metavar="FILE", envvar="PLAIT_CONFIG", show_envvar=True, help=text)


def models_option() -> Decorator:
    """Any number of models, as arguments or as `--model`; the command gets a tuple `model`."""
    text = "a directory, a .safetensors or .gguf file, or a Hub id; NAME[,ALIAS]=MODEL: under these names"

    def merge(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
        arguments: tuple[str, ...] = ctx.params.pop("model_arguments", ())
        return (*arguments, *value)

    argument = click.argument(
        "model_arguments", metavar="[MODEL]...", nargs=-1, is_eager=True, shell_complete=path_completion
    )
    named = click.option(
        "--model",
        "-m",
        metavar="MODEL",
        multiple=True,
        callback=merge,
        help=text,
        shell_complete=path_completion,
    )
    return options([argument, named])


def engine_option(name: str) -> Decorator:
    """One flag alone, as EngineConfig has it."""
    field = next(f for f in fields(EngineConfig) if f.name == name)
    return flag(EngineConfig, field, field.metadata["help"])


def common_options() -> Decorator:
    """`--verbose` and `--debug`: what every command has."""

    def debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if isinstance(ctx.obj, Session):
            ctx.obj.debug = value

    def verbose(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        log_to_stderr(logging.INFO if value else logging.WARNING)

    shared: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
    say = "say what is chosen and why: device, memory"
    return options(
        [
            click.option("--verbose", "-v", callback=verbose, help=say, **shared),
            click.option("--debug", callback=debug, help="show the traceback of an error", **shared),
        ]
    )


def json_option(text: str = "everything as one JSON object") -> Decorator:
    """`--json`, which commands get as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def to_json(result: object) -> str:
    """What `--json` shows."""
    return json.dumps(result, indent=2)


def write_json(result: object) -> None:
    """Print it, as `--json` does."""
    sys.stdout.write(to_json(result) + "\n")


def engine_settings(given: Mapping[str, object]) -> dict[str, Any]:
    """The EngineConfig fields among a command's parameters, with `--cpu` applied. Raises ConfigError."""
    settings = {f.name: given[f.name] for f in fields(EngineConfig)}
    if given.get("cpu"):
        if settings["device"] == "cuda":
            raise ConfigError("--cpu and --device cuda contradict each other; give one of them")
        settings["device"] = "cpu"
    return settings


def server_settings(given: Mapping[str, object]) -> dict[str, object]:
    """The ServerConfig fields among a command's parameters."""
    return {f.name: given[f.name] for f in fields(ServerConfig)}


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from a command's parameters. Raises InvalidField."""
    return SamplingParams(**{name: given[name] for name in SAMPLING_HELP})


def adapter_option() -> Callable[[Command], Command]:
    """--adapter, of commands that talk to one adapter."""
    return click.option(
        "--adapter", help="the name of the --lora that writes; default: the only one there is"
    )


def choose_adapter(asked: str | None, lora: Sequence[str]) -> str:
    """The adapter that was named, or the only one; "": there is none. Raises UsageError."""
    names = [parse_named(text)[0] for text in lora]
    if asked is not None and asked not in names:
        there = ", ".join(names) or "none is there: give --lora NAME=PATH"
        raise click.UsageError(f"--adapter {asked}: it is none of the adapters ({there})")
    if asked is None and len(names) > 1:
        raise click.UsageError(f"--adapter: there are {', '.join(names)}; say which one writes")
    return asked or (names[0] if names else "")


def find_changes(settings: dict[str, object]) -> dict[str, object]:
    """What differs from the defaults: another revision of Plait has defaults, and options, of its own."""
    plain = EngineConfig()
    return {name: value for name, value in settings.items() if value != getattr(plain, name)}


def parse_options(text: str) -> dict[str, Any]:
    """The engine options that are written in `text`, as EngineConfig has them. Raises ConfigError."""
    command = click.command("--compare")(engine_options()(lambda **given: given))
    try:
        context = command.make_context("--compare", shlex.split(text))
    except (click.UsageError, ValueError) as error:
        why = error.format_message() if isinstance(error, click.UsageError) else str(error)
        raise ConfigError(f"--compare {text!r}: {why}") from error
    settings = engine_settings(context.params)
    written = {
        name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    if "cpu" in written:
        written.add("device")
    return {name: value for name, value in settings.items() if name in written}


def read_stdin(what: str) -> str:
    """What is piped in. Raises UsageError on a terminal, where a read would wait without a word."""
    if sys.stdin.isatty():
        raise click.UsageError(f"there is nothing to do: give {what}, or pipe it in")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"stdin is not UTF-8: {error}") from error
