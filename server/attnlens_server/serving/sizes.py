"""What a call costs, known before the model runs: the bytes of its messages, and the memory that they take.

Letters: N texts, T tokens of a text, D hidden size.
"""

from attnlens.tensors import numpy_dtype
from attnlens_server.errors import ResponseTooLargeError
from attnlens_server.requests import EmbedPlan, EncodePlan

TEXT_OVERHEAD_BYTES = 128  # of a message: field tags, lengths, usage, numbers of layers and heads
TEXT_MEMORY_BYTES = 4096  # of a text under way: its item, arrays' headers, futures
TOKEN_MEMORY_BYTES = 192  # of a token in a message that is being made; measured: 130 to 150
MAKING_COPIES = 3  # of a reply that is being made: the message, what it is written to, and its bytes
SENDING_COPIES = 2  # of one that is not read yet: its bytes, and gRPC's copy of them
MESSAGE_COPIES = 5  # of the largest message, in float16: arrays in fp32, twice its size, and MAKING_COPIES
FEWER = "ask for fewer heads, the mean over heads or DATA_TYPE_FLOAT16"


class ReplySizes:
    """Measures replies of one model against the largest message."""

    def __init__(self, hidden_size: int, max_message_bytes: int) -> None:
        self._hidden_size = hidden_size
        self._max_message_bytes = max_message_bytes

    def check_embed(self, num_texts: int, plan: EmbedPlan) -> int:
        """Return the size of the reply of Embed.

        Raises:
            ResponseTooLargeError: it is over the limit.
        """
        row_bytes = plan.dimensions * numpy_dtype(plan.data_type).itemsize
        size = num_texts * (row_bytes + TEXT_OVERHEAD_BYTES)
        self.check("the response", size, "send fewer texts")
        return size

    def tensor_bytes(self, num_tokens: int, plan: EncodePlan) -> int:
        """Return the size of what Encode returns of a text beside its tokens."""
        return (
            TEXT_OVERHEAD_BYTES
            + plan.hidden_bytes(num_tokens, self._hidden_size)
            + len(plan.layers) * plan.layer_bytes(num_tokens)
        )

    def check_encode(self, size: int) -> None:
        """Compare the size of the reply of Encode, or of a part of it, with the limit.

        Raises:
            ResponseTooLargeError: it is over the limit.
        """
        self.check("the response", size, f"use EncodeStream, send fewer texts or layers, or {FEWER}")

    def hidden_state_bytes(self, num_tokens: int, plan: EncodePlan) -> int:
        """Return the size of a text's token vectors as the engine gives them, in fp32."""
        return 4 * num_tokens * self._hidden_size if plan.hidden_state else 0

    def attention_bytes(self, num_tokens: int, plan: EncodePlan) -> int:
        """Return the size of a text's weights of one layer as the engine gives them, in fp32."""
        return 4 * plan.num_head_maps * num_tokens**2

    def check_parts(self, field: str, num_tokens: int, plan: EncodePlan) -> int:
        """Return the size of the largest message of EncodeStream for a text, its tokens not counted.

        Raises:
            ResponseTooLargeError: it is over the limit.
        """
        head_bytes = TEXT_OVERHEAD_BYTES + plan.hidden_bytes(num_tokens, self._hidden_size)
        self.check(f"the token vectors of {field}", head_bytes, "use DATA_TYPE_FLOAT16 or a shorter text")
        layer_bytes = TEXT_OVERHEAD_BYTES + plan.layer_bytes(num_tokens) if plan.layers else 0
        self.check(f"one layer of {field}", layer_bytes, FEWER)
        return max(head_bytes, layer_bytes)

    def check(self, what: str, size: int, remedy: str) -> None:
        """Compare a size with the limit.

        Raises:
            ResponseTooLargeError: it is over the limit; the message calls it `what` and ends with `remedy`.
        """
        if size > self._max_message_bytes:
            raise ResponseTooLargeError(what, size, self._max_message_bytes, remedy)
