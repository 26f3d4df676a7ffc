"""Help that a beginner can read: options in groups, the few that every user needs first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import click
from click.shell_completion import CompletionItem

from plait.cli.common.other_names import find_argument, find_hint
from plait.config import EngineConfig, ServerConfig
from plait.request import SamplingParams

# Group -> parameters in the order of its list. What is in none goes to the group of its dataclass.
GROUPS = {
    "Options": (
        *("model", "prompt", "system", "input", "output", "host", "port", "served_model_name", "api_key"),
        *("config", "max_tokens", "temperature", "seed", "cpu", "max_model_len", "max_num_seqs", "threads"),
    ),
    "Several models": ("models_dir", "keep_alive", "models_memory", "max_loaded_models", "admin_key"),
    "Access": (
        *("api_key_file", "requests_per_minute", "tokens_per_minute", "max_requests_per_key"),
        *("allowed_host", "cors_origin", "tls_cert", "tls_key", "metrics_public", "root_path"),
    ),
    "Requests and replies": (
        *("any_model_name", "chat_template", "tool_call_parser", "reasoning_parser", "stream_interval"),
        *("max_waiting", "max_body_bytes", "max_connections", "shutdown_timeout_s"),
    ),
    "Tools of MCP servers": ("mcp_server", "mcp_token", "mcp_timeout_s"),
    "Logs and metrics": ("log_format", "log_level", "metrics_vllm_names", "otlp_endpoint"),
    "The model": (
        "vocab",
        "lora",
        "lora_folder",
        "max_loras",
        "max_lora_rank",
        "set",
        "probe",
        "offline",
        "quantize",
        "ssm_mode",
        "a_source",
    ),
    "Memory": (
        *("memory_limit", "gpu_memory", "kv_dtype", "state_dtype", "block_size", "prefix_cache"),
        *("snapshot_interval", "swap_memory", "cache_disk", "cache_disk_limit"),
        *("cache_disk_bandwidth", "cache_dir"),
        *("packed_cache", "startup_image"),
    ),
    "Speed and arithmetic": (
        *("device", "dtype", "ops", "no_fuse", "isa", "pdl", "max_num_batched_tokens", "max_step_ms"),
        *("speculate", "num_draft_tokens", "canvas_threshold", "canvas_edit_threshold", "canvas_edit_passes"),
        *("precise", "deterministic", "prefill"),
    ),
}
BY_CLASS = (
    (SamplingParams, "Sampling"),
    (ServerConfig, "More of the server"),
    (EngineConfig, "More of the engine"),
)
LAST = "Messages"
MESSAGES = {"--quiet", "--verbose", "--debug", "--help"}


class GroupedCommand(click.Command):
    """A command with a help that lists its options by GROUPS, then those of its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does it. Raises UsageError that says what an unknown option of another engine is here."""
        written = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = find_argument(error.option_name, written)
            known = [one for param in ctx.command.params for one in (*param.opts, *param.secondary_opts)]
            is_word = name.startswith("--")
            hint = find_hint(name, known) or (suggest_word(name, known) if is_word else "")
            raise click.UsageError(f"No such option {name!r}{hint}", ctx) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        listed = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        for title, params in group_options(listed):
            records = [record for p in params if (record := p.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def group_options(params: list[click.Option]) -> Iterator[tuple[str, list[click.Option]]]:
    """(title, its options), the beginner's first; every option is in exactly one of them."""
    last = [p for p in params if MESSAGES & set(p.opts)]
    found: dict[str, list[click.Option]] = {
        title: sorted((p for p in params if p.name in names), key=lambda p: names.index(p.name or ""))
        for title, names in GROUPS.items()
    }
    placed = {p.name for group in found.values() for p in group} | {p.name for p in last}
    for param in params:
        if param.name not in placed:
            found.setdefault(group_of(param.name), []).append(param)
    own = found.pop("", [])
    sampling = found.pop("Sampling", [])
    yield "Options", found.pop("Options")
    yield "This command", own
    yield "Sampling", sampling
    yield from found.items()
    yield LAST, last


def group_of(name: str | None) -> str:
    """The group of a parameter that GROUPS does not name: that of its dataclass, or none."""
    return next((title for cls, title in BY_CLASS if name in {f.name for f in fields(cls)}), "")


def suggest_word(name: str, known: Any) -> str:
    """The end of an error that names the closest of the known words, if there are any."""
    close = get_close_matches(name, list(known), n=2)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def path_completion(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete names of files."""
    return [CompletionItem(incomplete, type="file")]
