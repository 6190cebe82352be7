"""`attnlens completion SHELL`: the script that lets a shell complete commands, options and values."""

import click
from click.shell_completion import get_completion_class

from attnlens_cli.frame.sections import SectionCommand

_NAME, _VARIABLE = "attnlens", "_ATTNLENS_COMPLETE"


@click.command(
    cls=SectionCommand,
    epilog="""\b
Example:
  attnlens completion bash > attnlens.bash && . ./attnlens.bash
  attnlens completion zsh > _attnlens
  attnlens completion fish > attnlens.fish""",
)
@click.argument("shell", metavar="bash|zsh|fish", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script with which a shell completes commands, options, choices and file names.

    \b
    Write it where the shell looks when it starts:
      bash  ~/.local/share/bash-completion/completions/attnlens
      zsh   a directory of $fpath, as _attnlens, before compinit runs
      fish  ~/.config/fish/completions/attnlens.fish

    Bash must be 4.4 or newer, and looks there with the package bash-completion; without it, source the
    script in ~/.bashrc. The script calls `attnlens` for each completion, so it stays right after an update.
    """  # noqa: D301 - click's mark for lines to leave as they are
    script = get_completion_class(shell)
    if script is None:
        raise click.UsageError(f"click has no completion for {shell}: update click")
    root = click.get_current_context().find_root().command
    click.echo(script(root, {}, _NAME, _VARIABLE).source())
