"""How to install what a command needs: as README.md says, from a checkout. Imports nothing."""


def how_to_install(extra: str) -> str:
    """Return the words for an extra of the distribution, such as `server`."""
    return f"in a checkout of attnlens, pip install '.[{extra}]'"
