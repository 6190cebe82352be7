"""The graphs of a bundle in other runtimes than the one that it is served with."""
