"""Reference implementations of published models that `transformers` does not support.

Each is written from the formulas and with the publisher's tensor names, and shares nothing with the encoder.
"""
