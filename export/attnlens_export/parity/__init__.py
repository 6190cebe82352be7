"""Does a graph compute what the PyTorch encoder computes? Inputs, comparison, measurements, result."""
