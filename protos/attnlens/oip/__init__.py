"""Messages of the Open Inference Protocol."""
