"""Studies of a bundle's model, measured with its own graphs. Knows ONNX Runtime and tokenizers; never torch."""
