"""Steps that operations share: validation and tokenization.

Each operation has a module of its own with its request, its plan, its result and its steps. Everything runs
on the event loop, except functions that are passed to workers: validation of large requests, tokenization,
and the last steps of results.
"""

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from attnlens_server.core.admission import Budget
from attnlens_server.core.loaded_model import LoadedModel
from attnlens_server.core.process import Process
from attnlens_server.core.reply_costs import TOKEN_ID_BYTES, TOKENIZING_BYTES, UNIT_BYTES
from attnlens_server.core.stages import mark
from attnlens_server.core.usage import Clock
from attnlens_server.engine.sessions import give_back_freed_memory
from attnlens_server.operations.inputs import InputValidator, Request, num_bytes
from attnlens_server.text import EncodedInput, Input, InputEncoder, portions

SomeRequest = TypeVar("SomeRequest", bound=Request)
Plan = TypeVar("Plan")
Tokenized = TypeVar("Tokenized")

MAX_INLINE_VALIDATION = 1 << 16
"""Characters and token ids that are validated on the event loop."""
MAX_INLINE_TOKENIZATION = 1 << 10
"""Characters and token ids that are tokenized on the event loop, in about half a millisecond."""
MAX_INLINE_PARTS = 1 << 8
"""Results and layers of attention that are prepared on the event loop, at about 5 us each."""
MAX_KEPT_BYTES = 1 << 25
"""Working memory that a worker thread keeps for the next texts."""
MAX_INLINE_RESULT_BYTES = 1 << 14
"""Size of embeddings that are finished on the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedRequest(Request):
    """A request whose long inputs may be truncated.

    Attributes:
        truncate: Whether to truncate them. If None, the default of the server.
    """

    truncate: bool | None = None


@dataclass(frozen=True, slots=True)
class TextSources:
    """Texts of a call to tokenize.

    Attributes:
        inputs: Inputs.
        prefix: Text that is tokenized with each input: its prompt, and the strings of a chat template.
        byte_memory: Working memory of the tokenizer for each byte of text.
        budget: Resources of the call.
        is_shared: Whether the prefix is tokenized only once for all inputs.
    """

    inputs: Sequence[Input]
    prefix: str
    byte_memory: int
    budget: Budget
    is_shared: bool = False

    def portions(self) -> Iterator[range]:
        """Yield ranges of inputs to tokenize together."""
        prefix_size = 0 if self.is_shared else len(self.prefix)
        return portions([prefix_size + each.size for each in self.inputs])

    def memory_bytes(self, portion: range) -> int:
        """Return the working memory of the tokenizer for a portion."""
        texts = (text for index in portion for text in self.inputs[index].texts)
        num_prefixes = 1 if self.is_shared else len(portion)
        return self.byte_memory * (sum(map(num_bytes, texts)) + num_prefixes * num_bytes(self.prefix))

    @property
    def max_memory_bytes(self) -> int:
        """Working memory of the tokenizer for the longest input."""
        return max(self.memory_bytes(range(index, index + 1)) for index in range(len(self.inputs)))


class Operation:
    """An operation on one model.

    Args:
        process: Process that runs it.
        model: Model to run.
    """

    def __init__(self, process: Process, model: LoadedModel) -> None:
        self._process = process
        self._model = model
        self._spec = model.spec
        self._costs = model.costs
        self._inputs = InputValidator(model)
        self._encoder = InputEncoder(
            model.text_encoder,
            model.max_tokens,
            exclude_prompt=model.spec.exclude_prompt,
            auto_truncate=model.config.auto_truncate,
        )

    async def _validated(self, request: SomeRequest, plan: Callable[[SomeRequest], Plan]) -> Plan:
        """Return the plan of a request, which a worker thread makes if it is large."""
        self._model.check_name(request.model, request.model_version)
        planned = await self._process.workers.run_if(request.size > MAX_INLINE_VALIDATION, plan, request)
        mark("validate")
        return planned

    async def _in_portions(
        self,
        sources: TextSources,
        tokenize: Callable[[range], list[Tokenized]],
        reserve: Callable[[list[Tokenized]], None],
        *,
        is_slow: bool = True,
    ) -> list[Tokenized]:
        """Tokenize inputs portion by portion, and reserve the memory of each portion.

        A portion is short, so that a long request neither occupies a worker thread nor exceeds its memory.
        """
        texts: list[Tokenized] = []
        for portion in sources.portions():
            if is_slow:
                async with self._tokenizing(sources.memory_bytes(portion), sources.budget):
                    tokenized = await self._process.workers.run(tokenize, portion)
            else:
                tokenized = tokenize(portion)
            reserve(tokenized)
            texts += tokenized
        mark("tokenize")
        return texts

    @asynccontextmanager
    async def _tokenizing(self, memory_bytes: int, budget: Budget) -> AsyncGenerator[None]:
        """Reserve working memory of the tokenizer while the block runs.

        No more blocks run than there are worker threads, so that waiting calls hold no working memory. The
        memory of long texts is returned to the operating system, before another thread needs as much.
        """
        async with self._process.tokenizing:
            budget.memory.grow(memory_bytes)
            try:
                yield
                if memory_bytes > MAX_KEPT_BYTES:
                    await self._process.workers.run(give_back_freed_memory)
            finally:
                budget.memory.shrink(memory_bytes)

    async def _token_ids(
        self,
        request: TruncatedRequest,
        prompt: str,
        budget: Budget,
        clock: Clock,
        *,
        with_units: bool = False,
        check: Callable[[int, Sequence[EncodedInput]], None] = lambda _first, _encoded: None,
    ) -> list[EncodedInput]:
        """Return the token ids of all texts.

        Args:
            request: Request.
            prompt: Text of its prompt.
            budget: Resources of the call.
            clock: Durations of the call.
            with_units: Whether to group the tokens of texts into words.
            check: Called with the index of the first of some tokenized texts, and with these, where they were
                tokenized.

        Raises:
            RequestError: A text is too long, cannot be tokenized or fails the check, or memory is short.
        """
        token_bytes = TOKEN_ID_BYTES + (UNIT_BYTES if with_units else 0)

        def encode(portion: range) -> list[EncodedInput]:
            encoded = self._encoder.encode(
                request.inputs, portion, prompt=prompt, truncate=request.truncate, with_units=with_units
            )
            check(portion.start, encoded)
            return encoded

        def reserve(texts: list[EncodedInput]) -> None:
            num_tokens = sum(text.num_tokens for text in texts)
            budget.count_tokens(num_tokens)
            budget.memory.grow(token_bytes * num_tokens)

        started = time.monotonic()
        surroundings = self._encoder.surroundings(prompt)
        inputs = await self._in_portions(
            TextSources(request.inputs, surroundings, TOKENIZING_BYTES, budget),
            encode,
            reserve,
            is_slow=request.size + len(request.inputs) * len(surroundings) > MAX_INLINE_TOKENIZATION,
        )
        clock.add(tokenize_s=time.monotonic() - started)
        return inputs


def input_name(index: int) -> str:
    """Return the path of an input."""
    return f"inputs[{index}]"
