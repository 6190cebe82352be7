"""The peers: modules that run in environments of their own, `python -m bench.peers.with_NAME`."""
