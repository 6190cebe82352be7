"""Check of a bundle in an engine other than ONNX Runtime."""
