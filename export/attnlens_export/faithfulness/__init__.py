"""How well do the methods of explaining an embedding rank tokens? Measured for the model at hand."""
