"""The `attnlens` command: one thin module for each subcommand, heavy imports inside the command."""
