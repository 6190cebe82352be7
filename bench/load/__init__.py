"""Load generator: a process with many clients."""
