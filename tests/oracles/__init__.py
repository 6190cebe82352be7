"""Published models of which `transformers` has no class: our own writing of what their publishers describe.

Each is written from the formulas and with the publisher's tensor names, and shares nothing with the encoder.
"""
