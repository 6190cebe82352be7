"""How results are shown in the terminal or in a picture."""
