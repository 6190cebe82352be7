"""Message sizes and memory of replies, and estimates of the memory of tokens and texts."""

from collections.abc import Callable
from dataclasses import dataclass

from attnlens_server.errors import ResponseTooLargeError
from attnlens_server.text import Tokens

TEXT_MEMORY_BYTES = 4096  # per text: item, array headers, futures
TOKEN_MEMORY_BYTES = 384  # per token with its text and offsets
# Per UTF-8 byte of texts that are being tokenized, and of texts whose tokens are being described. Punctuation
# needs that much, since each character is a token. Words need less than a third.
TOKENIZING_BYTES, DESCRIBING_BYTES = 768, 1024
DECODING_BYTES = 128  # per token id while its text is computed
TOKEN_ID_BYTES = 16  # per queued token: id and type, int64
PART_BYTES = 1024  # per layer of a query: array headers, and its message without the data
UNIT_BYTES = 6  # per token: index of its unit, and whether it is special


@dataclass(frozen=True, slots=True)
class ReplyCosts:
    """Message sizes and memory of a protocol's replies.

    Attributes:
        max_response_bytes: Maximum message size.
        text_bytes: Overhead per text or layer in a message: tags, lengths and numbers.
        tokens_bytes: Returns an upper bound on the size of tokens in a message.
        serialization_copies: Copies of a message in memory during serialization.
        sending_copies: Copies of a message in memory until the client has read it.
    """

    max_response_bytes: int
    text_bytes: int
    tokens_bytes: Callable[[Tokens], int]
    serialization_copies: int
    sending_copies: int

    @property
    def least_memory_bytes(self) -> int:
        """Memory of the largest reply: its fp32 arrays, at most twice the message in fp16, and the copies."""
        return (2 + self.serialization_copies) * self.max_response_bytes

    def check(self, name: str, size: int, remedy: str) -> None:
        """Compare a message size with the limit. The error message contains `name` and `remedy`.

        Raises:
            ResponseTooLargeError: The size exceeds the limit.
        """
        if size > self.max_response_bytes:
            raise ResponseTooLargeError(name, size, self.max_response_bytes, remedy)
