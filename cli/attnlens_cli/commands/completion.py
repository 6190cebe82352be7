"""`attnlens completion`: print the completion script of a shell."""

import click
from click.shell_completion import get_completion_class

from attnlens_cli.frame.options import Command

_NAME, _VARIABLE = "attnlens", "_ATTNLENS_COMPLETE"


@click.command(
    cls=Command,
    epilog="""\b
Example:
  attnlens completion bash > attnlens.bash && . ./attnlens.bash
  attnlens completion zsh > _attnlens
  attnlens completion fish > attnlens.fish""",
)
@click.argument("shell", metavar="bash|zsh|fish", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands, options, choices and file names in a shell.

    \b
    Save it where the shell finds it at startup:
      bash  ~/.local/share/bash-completion/completions/attnlens
      zsh   a directory of $fpath, as _attnlens, before compinit runs
      fish  ~/.config/fish/completions/attnlens.fish

    Bash must be 4.4 or newer. It uses this directory if the package bash-completion is installed; otherwise
    source the script in ~/.bashrc. The script calls `attnlens`, so it needs no change after an update.
    """  # noqa: D301 - click's mark for preformatted lines
    script = get_completion_class(shell)
    if script is None:
        raise click.UsageError(f"this version of click has no completion for {shell}: update click")
    root = click.get_current_context().find_root().command
    click.echo(script(root, {}, _NAME, _VARIABLE).source())
