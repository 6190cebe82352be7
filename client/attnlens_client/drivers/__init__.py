"""What carries out the steps of the core: `steps` in blocking code, `blocking` and `awaited` over gRPC."""
