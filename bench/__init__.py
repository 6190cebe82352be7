"""What attnlens does on this machine, beside what a user would pick instead: `python -m bench`."""
