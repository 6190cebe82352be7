"""How large a reply will be, known before the model runs.

Letters: N texts, T tokens of a text, D hidden size.
"""

from collections.abc import Sequence

from attnlens.tensors import numpy_dtype
from attnlens.v1.encoder_service_pb2 import Token
from attnlens_server.errors import ResponseTooLargeError
from attnlens_server.requests import EmbedPlan, EncodePlan
from attnlens_server.text import EncodedInput

TEXT_OVERHEAD_BYTES = 128  # field tags, lengths, usage, numbers of layers and heads
TOKEN_OVERHEAD_BYTES = 4  # field tag and length
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

    def check_encode(
        self, inputs: Sequence[EncodedInput], tokens: Sequence[Sequence[Token]], plan: EncodePlan
    ) -> int:
        """Return the size of the reply of Encode.

        Raises:
            ResponseTooLargeError: it is over the limit.
        """
        size = sum(
            self._head_bytes(encoded, each_tokens, plan)
            + len(plan.layers) * plan.layer_bytes(encoded.num_tokens)
            for encoded, each_tokens in zip(inputs, tokens, strict=True)
        )
        self.check("the response", size, f"use EncodeStream, send fewer texts or layers, or {FEWER}")
        return size

    def check_parts(
        self, inputs: Sequence[EncodedInput], tokens: Sequence[Sequence[Token]], plan: EncodePlan
    ) -> int:
        """Return the size of the largest text of EncodeStream.

        Raises:
            ResponseTooLargeError: a message of one would be over the limit.
        """
        sizes = [0]
        for index, (encoded, each_tokens) in enumerate(zip(inputs, tokens, strict=True)):
            field = f"encode.inputs[{index}]"
            head_bytes = self._head_bytes(encoded, each_tokens, plan)
            self.check(f"the token vectors of {field}", head_bytes, "use DATA_TYPE_FLOAT16 or a shorter text")
            layer_bytes = plan.layer_bytes(encoded.num_tokens) + TEXT_OVERHEAD_BYTES if plan.layers else 0
            self.check(f"one layer of {field}", layer_bytes, FEWER)
            sizes.append(head_bytes + len(plan.layers) * layer_bytes)
        return max(sizes)

    def _head_bytes(self, encoded: EncodedInput, tokens: Sequence[Token], plan: EncodePlan) -> int:
        """Return the size of what a text has besides attention."""
        tokens_bytes = sum(token.ByteSize() + TOKEN_OVERHEAD_BYTES for token in tokens)
        return TEXT_OVERHEAD_BYTES + tokens_bytes + plan.hidden_bytes(encoded.num_tokens, self._hidden_size)

    def check(self, what: str, size: int, remedy: str) -> None:
        """Compare a size with the limit.

        Raises:
            ResponseTooLargeError: it is over the limit; the message calls it `what` and ends with `remedy`.
        """
        if size > self._max_message_bytes:
            raise ResponseTooLargeError(what, size, self._max_message_bytes, remedy)
