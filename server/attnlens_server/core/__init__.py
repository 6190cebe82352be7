"""What a process has, and a loaded model: no protocol."""
