"""Reads checkpoints with the libraries that own their formats: transformers and sentence-transformers.

Their code runs in a process of its own (`process`, `worker`), offline, with limits of memory and time, and
without code from the checkpoint.
"""
