"""The model service without our protocol, behind a few lines of another one."""

import asyncio
import base64
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlens_server.bundle import OutputRole, open_bundle
from attnlens_server.clients import Client
from attnlens_server.config import ServerConfig
from attnlens_server.core.admission import Budget, Reservation
from attnlens_server.core.reply_costs import ReplyCosts
from attnlens_server.engine import Engine
from attnlens_server.errors import InvalidFieldsError, ResponseTooLargeError
from attnlens_server.operations.attention import AttentionQuery, AttentionResult, AttentionView
from attnlens_server.operations.embed import EmbedRequest
from attnlens_server.operations.encode import EncodeRequest
from attnlens_server.operations.encode_stream import StreamAttention, StreamText
from attnlens_server.operations.service import ModelService
from attnlens_server.operations.tokenize import TokenizeRequest
from attnlens_server.operations.values import FLOAT16
from attnlens_server.text import Input, TextPair
from model_services import serve
from references import TEXTS, Reference

COSTS = ReplyCosts(1 << 20, 64, lambda tokens: 50 * len(tokens.ids), serialization_copies=2, sending_copies=1)


@pytest.fixture(scope="module")
def bundle_engine(minilm_bundle: Path) -> Any:
    bundle, config = open_bundle(minilm_bundle), ServerConfig(bundle=minilm_bundle)
    engine = Engine(bundle, config)
    engine.start(max_tokens=32)
    yield bundle, config, engine
    engine.close()


@pytest.fixture
async def service(bundle_engine: Any) -> AsyncIterator[ModelService]:
    bundle, config, engine = bundle_engine
    service = serve(bundle, config, engine, max_tokens=256, costs=COSTS)
    yield service
    service.process.workers.close()


def budget(service: ModelService) -> Budget:
    return Budget(Reservation(service.process.admission))


async def v1_embeddings(service: ModelService, body: dict[str, Any]) -> dict[str, Any]:
    """Respond like OpenAI's POST /v1/embeddings."""
    job = EmbedRequest(
        inputs=[Input(text=text) for text in body["input"]],
        dimensions=body.get("dimensions", 0),
        data_type=FLOAT16,
    )
    result = await service.embed(job, budget(service))
    data = [
        {"index": index, "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()}
        for index, vector in enumerate(result.embeddings)
    ]
    num_tokens = sum(usage.num_tokens for usage in result.usages)
    return {"object": "list", "data": data, "usage": {"prompt_tokens": num_tokens}}


async def test_service_supports_another_protocol(service: ModelService, reference: Reference) -> None:
    reply = await v1_embeddings(service, {"input": TEXTS[:3]})
    for entry, text in zip(reply["data"], TEXTS, strict=False):
        vector = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
        mean = reference(text)["last_hidden_state"].mean(axis=0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=5e-4)  # rounded to fp16
    assert reply["usage"]["prompt_tokens"] == sum(
        len(reference(text)["last_hidden_state"]) for text in TEXTS[:3]
    )
    with pytest.raises(InvalidFieldsError, match="dimensions is 400"):
        await v1_embeddings(service, {"input": ["a"], "dimensions": 400})


async def test_encode_returns_arrays_and_token_columns(service: ModelService, reference: Reference) -> None:
    queries = [
        AttentionQuery(layers=[-1], heads=[3]),
        AttentionQuery(OutputRole.ATTENTION_WEIGHTS, view=AttentionView.HEAD_MEAN),
    ]
    job = EncodeRequest(inputs=[Input(text=TEXTS[2])], last_hidden_state=True, attention=queries)
    result = await service.encode(job, budget(service))
    [text] = result.texts
    expected = reference(TEXTS[2])
    assert text.last_hidden_state is not None
    np.testing.assert_allclose(text.last_hidden_state, expected["last_hidden_state"], atol=1e-5)
    one, means = (result for result in text.attention if isinstance(result, AttentionResult))
    np.testing.assert_allclose(one.arrays[0], expected["attentions.5"][[3]], atol=1e-5)
    assert means.layers == tuple(range(6))
    for layer, array in enumerate(means.arrays):
        np.testing.assert_allclose(array[0], expected[f"attentions.{layer}"].mean(axis=0), atol=1e-5)
    held = [TEXTS[2][start:end] for start, end in text.tokens.chars]
    assert held[1:6] == ["Zoë", "'", "s", "café", "in"]
    assert "".join(text.tokens.texts[1:6]) == "zoe'scafein"


async def test_stream_returns_the_same_results_as_encode(service: ModelService) -> None:
    job = EncodeRequest(
        inputs=[Input(text="a cat"), Input(text_pair=TextPair("a", "b"))], attention=[AttentionQuery()]
    )
    whole = await service.encode(job, budget(service))
    parts = [part async for part in service.encode_stream(job, budget(service))]
    assert [part.input_index for part in parts] == [0] * 7 + [1] * 7
    texts = [part for part in parts if isinstance(part, StreamText)]
    assert [text.num_attention_parts for text in texts] == [6, 6]
    for index, text in enumerate(whole.texts):
        streamed = [part for part in parts if isinstance(part, StreamAttention) and part.input_index == index]
        assert [part.attention.layers for part in streamed] == [(layer,) for layer in range(6)]
        [attention] = text.attention
        assert isinstance(attention, AttentionResult)
        for part, array in zip(streamed, attention.arrays, strict=True):
            assert isinstance(part.attention, AttentionResult)
            np.testing.assert_allclose(part.attention.arrays[0], array, atol=1e-5)


async def test_response_size_is_determined_by_the_protocol(service: ModelService) -> None:
    job = EncodeRequest(inputs=[Input(text="word " * 100)], attention=[AttentionQuery()])
    with pytest.raises(ResponseTooLargeError, match="but the limit is 1048576"):
        await service.encode(job, budget(service))
    assert sum(pool.used for pool in service.process.admission._texts.values()) == 0


async def test_only_long_texts_are_tokenized_in_a_worker(
    service: ModelService, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    run = service.process.workers.run

    async def note(function: Any, *args: Any, **kwargs: Any) -> Any:
        taken.append(function)
        return await run(function, *args, **kwargs)

    monkeypatch.setattr(service.process.workers, "run", note)
    await service.embed(EmbedRequest(inputs=[Input(text="short")]), budget(service))
    assert not taken
    await service.embed(EmbedRequest(inputs=[Input(text="long " * 1000)], truncate=True), budget(service))
    assert len(taken) == 1


async def test_reservation_is_released_by_the_caller(service: ModelService) -> None:
    call = budget(service)
    portions = [
        portion async for portion in service.tokenize(TokenizeRequest(inputs=[Input(text="a cat")] * 3), call)
    ]
    assert [len(texts) for texts in portions] == [3]
    assert service.process.admission.memory.used > 0
    call.memory.release()
    assert service.process.admission.memory.used == 0


@pytest.mark.parametrize("room", ["operations.service", "engine", "text"])
def test_packages_behind_the_protocol_import_neither_grpc_nor_http(room: str) -> None:
    program = f"import sys, attnlens_server.{room}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert {"grpc", "http.server", "attnlens.v1.encoder_service_pb2"}.isdisjoint(loaded.stdout.split())


async def test_client_whose_calls_were_cancelled_is_served_as_soon_as_any_other(
    service: ModelService,
) -> None:
    inputs, num_done = [Input(text="word " * 50)] * 8, 0
    queue = service.model.engine.lanes["embeddings"]._queue

    async def embed(name: str) -> None:
        memory = Reservation(service.process.admission, Client(name))
        await service.embed(EmbedRequest(inputs=inputs), Budget(memory))
        memory.release()

    async def stay_busy() -> None:
        nonlocal num_done
        while True:
            await embed("busy")
            num_done += 1

    busy = [asyncio.create_task(stay_busy()) for _ in range(8)]
    for _ in range(100):
        call = asyncio.create_task(embed("impatient"))
        while not call.done() and not any(
            item.client.name == "impatient" and not item.is_abandoned
            for item in (*queue._waiting, *queue._arrived)
        ):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
    before = num_done
    async with asyncio.timeout(60):
        await embed("impatient")
    assert num_done - before <= 24  # of about 100 if it waited for the texts that were dropped
    for task in busy:
        task.cancel()
    await asyncio.wait(busy)
