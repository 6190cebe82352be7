"""How attention is shown: as text, as a picture, as JSON."""
