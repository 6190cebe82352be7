"""Files that are read and written piece by piece."""
