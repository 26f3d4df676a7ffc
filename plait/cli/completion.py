"""`plait completion`: the script that teaches a shell to complete `plait` with the tabulator key."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

VARIABLE = "_PLAIT_COMPLETE"  # what click looks at when a shell asks


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    eval "$(plait completion bash)"                                # in ~/.bashrc
    eval "$(plait completion zsh)"                                 # in ~/.zshrc, after compinit
    plait completion fish > ~/.config/fish/completions/plait.fish  # once
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows every shell of the choice"
    print(kind(ctx.find_root().command, {}, "plait", VARIABLE).source())
