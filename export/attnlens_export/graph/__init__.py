"""The ONNX graphs: traced from PyTorch, simplified, linted, written and read."""
