"""Check of a bundle in another engine than ONNX Runtime."""
