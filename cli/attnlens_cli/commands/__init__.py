"""One module for each subcommand; what is slow to import is imported when the command runs."""
