"""The `attnlens` command line."""


def how_to_install(extra: str) -> str:
    """Return the instruction that installs an extra of the distribution, such as `server`."""
    return f"in a checkout of attnlens, pip install '.[{extra}]'"
