"""Features specific to the asyncio client: concurrent tasks, cancellation, asynchronous streams."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from attnlens_client import AsyncClient, AttentionPart, AttentionQuery, Client, InputTooLongError
from served import ServerProcess


async def test_many_tasks_share_a_client(
    minilm_server: ServerProcess, client: Client, passages: list[str]
) -> None:
    texts = passages[:64]
    expected = client.embed(texts, truncate=True)
    async with AsyncClient(minilm_server.address) as many:
        vectors = await asyncio.gather(*(many.embed([text], truncate=True) for text in texts))
    assert np.abs(np.concatenate(vectors) - expected).max() <= 1e-5


async def test_results_of_concurrent_calls_keep_text_order(
    minilm_server: ServerProcess, client: Client, passages: list[str]
) -> None:
    texts = passages[:60]
    async with AsyncClient(minilm_server.address, batch_size=7) as many_calls:
        vectors = await many_calls.embed(texts, truncate=True)
        encoded = await many_calls.encode(texts[:20], truncate=True)
        tokenized = await many_calls.tokenize(texts[:20])
    assert np.abs(vectors - client.embed(texts, truncate=True)).max() <= 1e-5
    assert [text.num_tokens_total for text in encoded] == [len(text.tokens) for text in tokenized]
    assert tokenized == client.tokenize(texts[:20])


async def test_streams_return_the_same_results_as_encode(minilm_server: ServerProcess) -> None:
    texts = ["It rained.", "", "The cat sat on the mat."]
    async with AsyncClient(minilm_server.address, batch_size=2) as client:
        encoded = await client.encode(texts, attention=AttentionQuery())
        streamed = [text async for text in client.encode_stream(texts, attention=AttentionQuery())]
        query = AttentionQuery(layers=[0, 5])
        parts = [part async for part in client.encode_stream_parts(texts, attention=query)]
    for one, other in zip(encoded, streamed, strict=True):
        assert np.abs(one.weights - other.weights).max() <= 1e-5
    layers = [(part.input_index, part.layer) for part in parts if isinstance(part, AttentionPart)]
    assert layers == [(index, layer) for index in range(3) for layer in (0, 5)]


async def test_stream_can_be_closed_early(minilm_server: ServerProcess) -> None:
    async with AsyncClient(minilm_server.address) as client:
        async with aclosing(client.encode_stream(["word " * 200] * 40, attention=AttentionQuery())) as stream:
            assert (await anext(stream)).num_tokens == 202
        assert (await client.embed(["It rained."])).shape == (1, 384)


async def test_failure_of_one_call_is_raised_once_with_the_text_index(
    minilm_server: ServerProcess,
) -> None:
    async with AsyncClient(minilm_server.address, batch_size=4) as client:
        with pytest.raises(InputTooLongError) as caught:
            await client.embed(["a"] * 10 + ["word " * 300] + ["a"] * 30)
        assert caught.value.text_index == 10
        assert (await client.embed(["a"])).shape == (1, 384)


async def test_client_is_usable_after_a_task_is_canceled(minilm_server: ServerProcess) -> None:
    async with AsyncClient(minilm_server.address) as client:
        task = asyncio.create_task(client.embed(["word " * 200] * 200))
        await client.get_model()  # wait until the task has sent a request
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.embed([])).shape == (0, 384)
        assert (await client.list_models())[0].name == (await client.get_model()).name
