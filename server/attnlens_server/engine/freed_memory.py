"""Giving memory back to the system that this process has freed."""

import ctypes


def give_back_freed_memory() -> None:
    """Let the C library give back what it keeps for later; glibc's does so only if asked.

    A graph that was just opened leaves much: its file, and weights in other forms.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
