"""Numerical comparison of ONNX graphs with the PyTorch encoder."""
