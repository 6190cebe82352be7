"""Asynchronous client."""

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

from attnlens_client.connection import Connection
from attnlens_client.core import calls, plans, scoring
from attnlens_client.core.plans import (
    ComparePlan,
    EmbedIterPlan,
    EmbedPlan,
    EncodePlan,
    ExplainPlan,
    TokenizePlan,
    takes,
)
from attnlens_client.core.scoring import ClassifyPlan, RerankPlan, ScorePlan
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
from attnlens_client.scores import Classification, RankedDocument, Scores


class AsyncClient(Connection):
    """Asynchronous client for one event loop. Its methods have the arguments and errors of `Client`.

    Create it while the event loop is running.

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
        """Close the connection. Running calls raise AttnlensError."""
        await self._driver.close()

    @takes(plans.embed)
    async def embed(self, plan: EmbedPlan) -> Array:
        """Return embeddings (N, D). See `Client.embed`."""
        return (await self._driver.result(calls.run(self._session, plan))).vectors

    @takes(plans.embed)
    async def embed_with_usage(self, plan: EmbedPlan) -> Embeddings:
        """Return embeddings with usage and model version. See `Client.embed_with_usage`."""
        return await self._driver.result(calls.run(self._session, plan))

    @takes(plans.embed_iter)
    def embed_iter(self, plan: EmbedIterPlan) -> AsyncGenerator[Embeddings]:
        """Yield the embeddings of any number of texts in batches. See `Client.embed_iter`.

        The texts are a synchronous iterable, which is read on the event loop. To stop early, close the
        iterator: `async with contextlib.aclosing(client.embed_iter(...))`.
        """
        return self._driver.items(calls.embed_iter(self._session, plan))

    @takes(plans.encode)
    async def encode(self, plan: EncodePlan) -> list[EncodedText]:
        """Return tokens, token vectors and attention of each text. See `Client.encode`."""
        return await self._driver.result(calls.run(self._session, plan))

    @takes(plans.encode)
    def encode_stream(self, plan: EncodePlan) -> AsyncGenerator[EncodedText]:
        """Yield the results of `encode` one text at a time. See `Client.encode_stream`.

        To stop early, close the iterator: `async with contextlib.aclosing(client.encode_stream(...))`.
        """
        return self._driver.items(calls.encode_stream(self._session, plan))

    @takes(plans.encode)
    def encode_stream_parts(self, plan: EncodePlan) -> AsyncGenerator[TextPart | AttentionPart]:
        """Yield the results of `encode` in parts. See `Client.encode_stream_parts`."""
        return self._driver.items(calls.encode_stream_parts(self._session, plan))

    @takes(plans.tokenize)
    async def tokenize(self, plan: TokenizePlan) -> list[TokenizedText]:
        """Return all tokens of each text without running the model. See `Client.tokenize`."""
        return await self._driver.result(calls.run(self._session, plan))

    @takes(plans.explain)
    async def explain(self, plan: ExplainPlan) -> list[Explanation]:
        """Return the contributions of tokens to embeddings or similarities. See `Client.explain`."""
        return await self._driver.result(calls.run(self._session, plan))

    @takes(plans.compare)
    async def compare(self, plan: ComparePlan) -> Comparison:
        """Return the contributions of tokens of two texts to their similarity. See `Client.compare`."""
        return await self._driver.result(calls.compare(self._session, plan))

    @takes(scoring.rerank)
    async def rerank(self, plan: RerankPlan) -> list[RankedDocument]:
        """Return the documents by descending relevance to a query. See `Client.rerank`."""
        return await self._driver.result(calls.run(self._session, plan))

    @takes(scoring.score)
    async def score(self, plan: ScorePlan) -> Scores:
        """Return the relevance of documents to a query, in their order. See `Client.score`."""
        return await self._driver.result(calls.run(self._session, plan))

    @takes(scoring.score_pairs)
    async def score_pairs(self, plan: ScorePlan) -> Scores:
        """Return the relevance of the second to the first text of each pair. See `Client.score_pairs`."""
        return await self._driver.result(calls.run(self._session, plan))

    @takes(scoring.classify)
    async def classify(self, plan: ClassifyPlan) -> Classification:
        """Return logits and scores of each text for the labels of a classifier. See `Client.classify`."""
        return await self._driver.result(calls.run(self._session, plan))

    async def get_model(self, name: str = "") -> ModelInfo:
        """Return the description of a model. See `Client.get_model`."""
        return await self._driver.result(calls.get_model(self._session, name))

    async def list_models(self) -> list[ModelInfo]:
        """Return the descriptions of all models."""
        return await self._driver.result(calls.list_models(self._session))
