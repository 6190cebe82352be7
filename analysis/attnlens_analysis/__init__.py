"""Studies of a bundle's model by its own graphs. Knows ONNX Runtime and tokenizers; never torch."""
