"""The speed of attnlens on this machine, beside that of other programs: `python -m bench`."""
