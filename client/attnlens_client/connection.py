"""What `Client` and `AsyncClient` share: where to connect and how calls travel."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc

from attnlens_client.attempts import Attempts
from attnlens_client.channel import UNLIMITED, Settings, channel_options

if TYPE_CHECKING:
    from attnlens_client.results import ModelInfo


class Connection(ABC):
    """An address, settings, and the models seen so far."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = 60.0,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        batch_size: int = 128,
        max_in_flight: int = 4,
        max_attempts: int = 5,
        wait_for_ready: bool = False,
        max_message_bytes: int = UNLIMITED,
        channel_options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """Prepare a connection to `address` (host:port), which is made with the first call.

        The arguments are those of `Settings`, where each is explained.
        """
        self.address = address
        self.settings = Settings(
            timeout_s=timeout_s,
            credentials=credentials,
            metadata=metadata,
            batch_size=batch_size,
            max_in_flight=max_in_flight,
            max_attempts=max_attempts,
            wait_for_ready=wait_for_ready,
            max_message_bytes=max_message_bytes,
            channel_options=channel_options,
        )
        self._models: dict[str, ModelInfo] = {}
        self._open()

    @abstractmethod
    def _open(self) -> None:
        """Make the channel."""

    def _channel_options(self) -> list[tuple[str, Any]]:
        return channel_options(self.settings)

    def _call_options(self, attempts: Attempts) -> dict[str, Any]:
        return {"timeout": attempts.timeout_s(), "metadata": tuple(self.settings.metadata)}
