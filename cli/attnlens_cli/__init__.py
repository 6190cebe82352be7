"""The `attnlens` command: `main` starts it, `app` finds the subcommand, `commands` has a module for each."""
