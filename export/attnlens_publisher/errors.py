"""Exceptions of this package.

PublisherError
├── RefusedError  the checkpoint has a setting that cannot be served
├── MissingError  a library is not installed
└── FailedError   the library failed, or needed more memory or time than allowed
"""


class PublisherError(Exception):
    """A publisher's library gave no result. The message contains the reason."""


class RefusedError(PublisherError):
    """The checkpoint has a setting that cannot be served. The message contains the remedy."""


class MissingError(PublisherError):
    """A library is not installed.

    Attributes:
        package: Its name on PyPI.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        super().__init__(f"the package {package} is not installed")


class FailedError(PublisherError):
    """The library failed, or needed more memory or time than allowed."""
