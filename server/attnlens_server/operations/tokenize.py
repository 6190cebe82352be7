"""Tokenize: the tokens of each text without running the model, and the texts of token ids."""

import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from attnlens_server.core.admission import Budget
from attnlens_server.core.reply_costs import DECODING_BYTES, DESCRIBING_BYTES
from attnlens_server.core.stages import mark
from attnlens_server.errors import InvalidFieldsError
from attnlens_server.operations.inputs import Request
from attnlens_server.operations.operation import Operation, TextSources
from attnlens_server.text import Tokens, portions


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest(Request):
    """Request for the tokens of each text."""


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """All tokens of one text, without truncation."""

    tokens: Tokens
    exceeds_max_tokens: bool


class TokenizeOperation(Operation):
    """Returns the tokens of texts, and the texts of token ids."""

    async def __call__(self, request: TokenizeRequest, budget: Budget) -> AsyncGenerator[list[TokenizedText]]:
        """Yield the tokens of all texts, several texts at a time.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        prompt = await self._validated(request, self.plan)
        costs, size = self._costs, 0
        with self._process.admission.slots("embeddings", len(request.inputs), budget.client):
            budget.charge_texts(len(request.inputs))
            sources = TextSources(
                request.inputs, self._encoder.surroundings(prompt), DESCRIBING_BYTES, budget
            )
            for portion in sources.portions():
                # The tokens remain in memory until the caller has serialized them.
                async with self._tokenizing(sources.memory_bytes(portion), budget):
                    texts, part_bytes = await self._process.workers.run(
                        self._tokenize, request, portion, prompt
                    )
                    mark("tokenize")
                    size += part_bytes
                    num_tokens = sum(len(text.tokens.ids) for text in texts)
                    budget.count_tokens(num_tokens)
                    self._costs.check("the response", size, "send fewer or shorter texts")
                    # The part, and its copy in the whole.
                    budget.memory.grow(
                        costs.sending_copies * part_bytes
                        + budget.conversion.memory_bytes(part_bytes, num_tokens, len(texts))
                    )
                    yield texts

    async def decode(
        self, request: TokenizeRequest, budget: Budget, *, skip_special_tokens: bool
    ) -> list[str]:
        """Return the text of each input, which must consist of token ids.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        await self._validated(request, self.plan)
        budget.charge_texts(len(request.inputs))
        budget.count_tokens(sum(each.size for each in request.inputs))
        texts: list[str] = []
        for portion in portions([each.size for each in request.inputs]):
            working_bytes = DECODING_BYTES * sum(request.inputs[index].size for index in portion)
            async with self._tokenizing(working_bytes, budget):
                decoded = await self._process.workers.run(
                    self._encoder.decode, request.inputs, portion, skip_special_tokens=skip_special_tokens
                )
            # The texts as Python strings, and in JSON.
            budget.memory.grow(3 * sum(map(sys.getsizeof, decoded)))
            texts += decoded
        return texts

    def plan(self, request: TokenizeRequest) -> str:
        """Validate a Tokenize request and return the text of the prompt.

        Raises:
            InvalidFieldsError: One or more fields are invalid.
        """
        prompt, violations = self._inputs.validate(request)
        if violations:
            raise InvalidFieldsError(violations)
        return prompt

    def _tokenize(
        self, request: TokenizeRequest, portion: range, prompt: str
    ) -> tuple[list[TokenizedText], int]:
        """Return the tokens of several texts, and their message size in bytes."""
        texts, size = [], 0
        for encoded in self._encoder.encode_whole(request.inputs, portion, prompt):
            tokens = self._encoder.describe(encoded)
            texts.append(TokenizedText(tokens, encoded.num_tokens > self._model.max_tokens))
            size += self._costs.tokens_bytes(tokens)
        return texts, size
