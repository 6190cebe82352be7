"""The others, each a module that runs in an environment of its own: `python -m bench.peers.with_NAME`."""
