"""What all commands share: options, settings, failures, logs and signals."""
