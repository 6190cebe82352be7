"""The load on a server: a process with many clients."""
