"""Benchmarks of attnlens against other embedding libraries and servers: `python -m bench`."""
