"""What all commands have in common: options, failures, logs, signals."""
