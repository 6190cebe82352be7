"""Drivers, which execute the steps of the core with blocking or asynchronous gRPC calls."""
