"""Input and output files, read and written in bounded memory."""
