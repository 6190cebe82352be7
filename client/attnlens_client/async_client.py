"""The client for asyncio. `Client` is the same for ordinary Python."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import Self

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_client import messages, plans, replies
from attnlens_client.async_calls import AsyncCalls
from attnlens_client.messages import DataTypeName, HeadReductionName, PoolingName, Text
from attnlens_client.results import (
    Array,
    Embeddings,
    EncodedText,
    HeadPart,
    LayerPart,
    ModelInfo,
    TokenizedText,
)


class AsyncClient(AsyncCalls):
    """A connection to an attnlens server, for one event loop and any number of its tasks.

    Make it where the loop is running. Methods, arguments and failures are those of `Client`.

    >>> async def main():
    ...     async with AsyncClient(address) as client:
    ...         return await asyncio.gather(client.embed(["The cat sat."]), client.embed(["It rained."]))
    >>> [vectors.shape for vectors in asyncio.run(main())]
    [(1, 384), (1, 384)]
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is running, which raises AttnlensError there, and close the connection."""
        self._closed = True
        for call in tuple(self._calls):
            call.cancel()
        await self._channel.close()

    async def embed(
        self,
        texts: Iterable[Text],
        *,
        pooling: PoolingName | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate: bool = False,
        dtype: DataTypeName = "float32",
        model: str = "",
    ) -> Array:
        """Return one vector for each text: shape (N, D). See `Client.embed`."""
        result = await self.embed_with_usage(
            texts,
            pooling=pooling,
            normalize=normalize,
            dimensions=dimensions,
            prompt_name=prompt_name,
            prompt=prompt,
            truncate=truncate,
            dtype=dtype,
            model=model,
        )
        return result.vectors

    async def embed_with_usage(
        self,
        texts: Iterable[Text],
        *,
        pooling: PoolingName | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate: bool = False,
        dtype: DataTypeName = "float32",
        model: str = "",
    ) -> Embeddings:
        """Return the vectors together with the number of tokens of each text. See `Client.embed`."""
        template = messages.embed_request(
            pooling=pooling,
            normalize=normalize,
            dimensions=dimensions,
            prompt_name=prompt_name,
            prompt=prompt,
            truncate=truncate,
            dtype=dtype,
            model=model,
        )
        return await self._run(self._stub.Embed, plans.embed(texts, template))

    async def encode(
        self,
        texts: Iterable[Text],
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        head_reduction: HeadReductionName = "none",
        hidden_states: bool = True,
        attentions: bool = True,
        truncate: bool = False,
        dtype: DataTypeName = "float32",
        model: str = "",
    ) -> list[EncodedText]:
        """Return tokens, token vectors and attention weights for each text. See `Client.encode`."""
        template = messages.encode_request(
            layers=layers,
            heads=heads,
            head_reduction=head_reduction,
            hidden_states=hidden_states,
            attentions=attentions,
            truncate=truncate,
            dtype=dtype,
            model=model,
        )
        return await self._run(self._stub.Encode, plans.encode(texts, template))

    def stream(
        self,
        texts: Iterable[Text],
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        head_reduction: HeadReductionName = "none",
        hidden_states: bool = True,
        attentions: bool = True,
        truncate: bool = False,
        dtype: DataTypeName = "float32",
        model: str = "",
    ) -> AsyncGenerator[EncodedText]:
        """Yield what `encode` returns, one text at a time, whatever its size. See `Client.stream`.

        To stop early, close the iterator: `async with contextlib.aclosing(client.stream(...))`.
        """
        template = messages.encode_request(
            layers=layers,
            heads=heads,
            head_reduction=head_reduction,
            hidden_states=hidden_states,
            attentions=attentions,
            truncate=truncate,
            dtype=dtype,
            model=model,
        )
        return self._assembled(plans.encode(texts, template))

    def stream_parts(
        self,
        texts: Iterable[Text],
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        head_reduction: HeadReductionName = "none",
        hidden_states: bool = True,
        attentions: bool = True,
        truncate: bool = False,
        dtype: DataTypeName = "float32",
        model: str = "",
    ) -> AsyncGenerator[HeadPart | LayerPart]:
        """Yield for each text its head, then its attention weights by layer. See `Client.stream_parts`."""
        template = messages.encode_request(
            layers=layers,
            heads=heads,
            head_reduction=head_reduction,
            hidden_states=hidden_states,
            attentions=attentions,
            truncate=truncate,
            dtype=dtype,
            model=model,
        )
        return self._parts(plans.encode(texts, template))

    async def tokenize(self, texts: Iterable[str], *, model: str = "") -> list[TokenizedText]:
        """Return all tokens of each text, whatever the model's limit, without running the model."""
        return await self._run(self._stub.Tokenize, plans.tokenize(texts, model))

    async def get_model(self, name: str = "") -> ModelInfo:
        """Return sizes, limits, parity figures and versions of a model; "" is the server's only one."""
        return await self._get_model(name)

    async def list_models(self) -> list[ModelInfo]:
        """Return the models that the server holds."""
        responses = await self._call_all(self._stub.ListModels, [(0, pb.ListModelsRequest())], None)
        return [replies.model("", model) for model in responses[0].models]
