"""The client for asyncio. `Client` is the same for ordinary Python."""

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

from attnlens_client.connection import Connection
from attnlens_client.core import methods, plans
from attnlens_client.core.explanations import plans as explanation_plans
from attnlens_client.core.explanations.plans import ComparePlan, ExplainPlan
from attnlens_client.core.plans import EmbedIterPlan, EmbedPlan, EncodePlan, TokenizePlan
from attnlens_client.drivers.awaited import AsyncDriver
from attnlens_client.explanations import Comparison, Explanation
from attnlens_client.model_info import ModelInfo
from attnlens_client.results import (
    Array,
    AttentionPart,
    Embeddings,
    EncodedText,
    TextPart,
    TokenizedText,
)
from attnlens_client.signatures import takes


class AsyncClient(Connection):
    """A connection to an attnlens server, for one event loop and any number of its tasks.

    Make it where the loop is running. Methods, arguments and failures are those of `Client`.

    >>> async def main():
    ...     async with AsyncClient(address) as client:
    ...         return await asyncio.gather(client.embed(["The cat sat."]), client.embed(["It rained."]))
    >>> [vectors.shape for vectors in asyncio.run(main())]
    [(1, 384), (1, 384)]
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._driver = AsyncDriver(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is running, which raises AttnlensError there, and close the connection."""
        await self._driver.close()

    @takes(plans.embed)
    async def embed(self, plan: EmbedPlan) -> Array:
        """Return one vector for each text: shape (N, D). See `Client.embed`."""
        return (await self._driver.result(methods.run(self._session, plan))).vectors

    @takes(plans.embed)
    async def embed_with_usage(self, plan: EmbedPlan) -> Embeddings:
        """Return the vectors, the tokens of each text and the model's version. See `Client.embed`."""
        return await self._driver.result(methods.run(self._session, plan))

    @takes(plans.embed_iter)
    def embed_iter(self, plan: EmbedIterPlan) -> AsyncGenerator[Embeddings]:
        """Yield the vectors of any number of texts, a batch at a time. See `Client.embed_iter`.

        The texts are an ordinary iterable, which is read on the event loop. To stop early, close the
        iterator: `async with contextlib.aclosing(client.embed_iter(...))`.
        """
        return self._driver.items(methods.embed_iter(self._session, plan))

    @takes(plans.encode)
    async def encode(self, plan: EncodePlan) -> list[EncodedText]:
        """Return tokens, token vectors and what `attention` asks for of each text. See `Client.encode`."""
        return await self._driver.result(methods.run(self._session, plan))

    @takes(plans.encode)
    def encode_stream(self, plan: EncodePlan) -> AsyncGenerator[EncodedText]:
        """Yield what `encode` returns, one text at a time, whatever its size. See `Client.encode_stream`.

        To stop early, close the iterator: `async with contextlib.aclosing(client.encode_stream(...))`.
        """
        return self._driver.items(methods.encode_stream(self._session, plan))

    @takes(plans.encode)
    def encode_stream_parts(self, plan: EncodePlan) -> AsyncGenerator[TextPart | AttentionPart]:
        """Yield a `TextPart`, then `AttentionPart`s for each text. See `Client.encode_stream_parts`."""
        return self._driver.items(methods.encode_stream_parts(self._session, plan))

    @takes(plans.tokenize)
    async def tokenize(self, plan: TokenizePlan) -> list[TokenizedText]:
        """Return all tokens of each text, whatever the model's limit, without running the model."""
        return await self._driver.result(methods.run(self._session, plan))

    @takes(explanation_plans.explain)
    async def explain(self, plan: ExplainPlan) -> list[Explanation]:
        """Return what each token of each text did for its embedding, or for a similarity.

        See `Client.explain`.
        """
        return await self._driver.result(methods.run(self._session, plan))

    @takes(explanation_plans.compare)
    async def compare(self, plan: ComparePlan) -> Comparison:
        """Return what each token of two texts did for their similarity. See `Client.compare`."""
        return await self._driver.result(methods.compare(self._session, plan))

    async def get_model(self, name: str = "") -> ModelInfo:
        """Return version, state, sizes, limits and parity figures of a model; "" is the server's only one."""
        return await self._driver.result(methods.get_model(self._session, name))

    async def list_models(self) -> list[ModelInfo]:
        """Return the models that the server holds."""
        return await self._driver.result(methods.list_models(self._session))
