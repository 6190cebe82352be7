"""How `attnlens bench` shows what it measured."""
