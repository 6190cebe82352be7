"""Peer libraries. Each module runs in its own environment: `python -m bench.peers.with_NAME`."""
