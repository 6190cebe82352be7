"""openai-python. Runs with both major versions."""

import asyncio
from typing import Any

import openai

from clients_http.server_under_test import (
    DIMENSIONS,
    LONG,
    MAX_INPUTS,
    QUERY,
    SLOW,
    SOME,
    TEXTS,
    Server,
    raises,
)

REQUESTS_WITH_RETRIES = 3


def client(server: Server, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", **options)


def counting(server: Server, on_response: Any = lambda _: None) -> tuple[openai.OpenAI, list[Any]]:
    """Return a client with default retries, and the list of its responses."""
    responses: list[Any] = []
    hooks = {"response": [responses.append, on_response]}
    return client(server, http_client=openai.DefaultHttpxClient(event_hooks=hooks)), responses


def rows(result: Any) -> list[Any]:
    assert [item.index for item in result.data] == list(range(len(result.data)))
    return [item.embedding for item in result.data]


def check_default_format_has_the_vectors_of_grpc(server: Server) -> None:
    result = client(server).embeddings.create(model=server.model, input=TEXTS)
    server.check(rows(result), "texts")
    assert (result.object, result.model) == ("list", server.model)
    assert result.usage.prompt_tokens == result.usage.total_tokens == sum(map(len, server.vectors["tokens"]))
    server.check(rows(client(server).embeddings.create(model=server.model, input=QUERY)), "query")


def check_float_format_has_the_vectors_of_grpc(server: Server) -> None:
    result = client(server).embeddings.create(model=server.model, input=TEXTS, encoding_format="float")
    server.check(rows(result), "texts")


def check_dimensions_are_applied_or_rejected(server: Server) -> None:
    create = client(server).embeddings.create
    server.check(rows(create(model=server.model, input=TEXTS, dimensions=DIMENSIONS)), "short")
    with raises(openai.BadRequestError, "dimensions", "385", "384") as errors:
        create(model=server.model, input=TEXTS, dimensions=385)
    assert (errors[0].param, errors[0].type) == ("dimensions", "invalid_request_error")


def check_concurrent_calls_get_their_own_vectors(server: Server) -> None:
    async def main() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-") as asynchronous:
            create = asynchronous.embeddings.create
            calls = (create(model=server.model, input=text) for text in SOME)
            return [rows(result)[0] for result in await asyncio.gather(*calls)]

    server.check(asyncio.run(main()), "some")


def check_models_are_listed(server: Server) -> None:
    [model] = client(server).models.list()
    assert (model.id, model.owned_by) == (server.model, "attnlens")
    assert client(server).models.retrieve(server.model) == model
    with raises(openai.NotFoundError, "organization/other"):
        client(server).models.retrieve("organization/other")


def check_unknown_model_is_not_found(server: Server) -> None:
    with raises(openai.NotFoundError, "other", server.model) as errors:
        client(server).embeddings.create(model="other", input=TEXTS)
    assert errors[0].type == "not_found_error"


def check_long_text_is_rejected_or_truncated(server: Server) -> None:
    create = client(server).embeddings.create
    with raises(openai.BadRequestError, "402", "256") as errors:
        create(model=server.model, input=["short", LONG])
    assert errors[0].code == "context_length_exceeded"
    server.check(rows(create(model=server.model, input=LONG, extra_body={"truncate": True})), "long")


def check_too_many_texts_are_rejected(server: Server) -> None:
    with raises(openai.BadRequestError, "input", f"{MAX_INPUTS + 1} texts", f"{MAX_INPUTS}"):
        client(server).embeddings.create(model=server.model, input=["a"] * (MAX_INPUTS + 1))


def check_too_large_body_is_rejected_without_retries(server: Server) -> None:
    counted, responses = counting(server)
    with raises(openai.APIStatusError, "bodies are limited to") as errors:
        counted.embeddings.create(model=server.model, input=["a" * 100_000] * 120)
    assert errors[0].status_code == 413
    assert len(responses) == 1


def check_token_ids_are_rejected_with_the_option_of_langchain(server: Server) -> None:
    for ids in ([101, 2023, 102], [[101, 102], [101, 2023, 102]]):
        with raises(openai.BadRequestError, "check_embedding_ctx_length=False", "--http-token-ids") as errors:
            client(server).embeddings.create(model=server.model, input=ids)
        assert errors[0].param == "input"


def check_overload_is_a_rate_limit_error_after_three_requests(server: Server) -> None:
    counted, responses = counting(server)
    with server.full(), raises(openai.RateLimitError, "try again later") as errors:
        counted.embeddings.create(model=server.model, input=TEXTS)
    assert (errors[0].code, errors[0].type) == ("overloaded", "rate_limit_error")
    assert [response.status_code for response in responses] == [429] * REQUESTS_WITH_RETRIES
    assert float(responses[0].headers["retry-after-ms"]) == 250


def check_retry_succeeds_after_an_overload(server: Server) -> None:
    with server.full() as release:
        counted, responses = counting(server, lambda _: release())
        result = counted.embeddings.create(model=server.model, input=TEXTS)
    server.check(rows(result), "texts")
    assert [response.status_code for response in responses] == [429, 200]


def check_server_drops_the_work_of_a_call_that_timed_out(server: Server) -> None:
    impatient = client(server, max_retries=0, timeout=0.2)
    with server.drops_work(), raises(openai.APITimeoutError):
        impatient.embeddings.create(model=server.model, input=SLOW, extra_body={"truncate": True})


def check_server_drops_the_work_of_a_cancelled_call(server: Server) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-") as asynchronous:
            call = asyncio.create_task(
                asynchronous.embeddings.create(model=server.model, input=SLOW, extra_body={"truncate": True})
            )
            name = 'attnlens_queue_inputs{graph="embeddings"}'
            await asyncio.to_thread(server.wait_for_metric, name, len(SLOW))
            call.cancel()
            with raises(asyncio.CancelledError):
                await call

    with server.drops_work():
        asyncio.run(main())
