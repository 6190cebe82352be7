"""The graphs of a bundle in another engine than ONNX Runtime, compiled as the server compiles them."""
