"""ollama."""

import asyncio
from typing import Any

import ollama

from clients_http.server_under_test import DIMENSIONS, LONG, QUERY, TEXTS, Server, raises


def check_vectors_are_those_of_grpc(server: Server) -> None:
    embed = ollama.Client(host=server.url).embed
    found = embed(model=server.model, input=TEXTS)
    server.check(found.embeddings, "texts")
    assert found.model == server.model
    assert found.prompt_eval_count == sum(map(len, server.vectors["tokens"]))
    server.check(embed(model=f"{server.model}:latest", input=QUERY).embeddings, "query")
    server.check(embed(model=server.model, input=LONG).embeddings, "long")
    server.check(embed(model=server.model, input=TEXTS, dimensions=DIMENSIONS).embeddings, "short")


def check_asynchronous_client(server: Server) -> None:
    async def main() -> Any:
        return await ollama.AsyncClient(host=server.url).embed(model=server.model, input=TEXTS)

    server.check(asyncio.run(main()).embeddings, "texts")


def check_errors_have_the_status_and_message(server: Server) -> None:
    embed = ollama.Client(host=server.url).embed
    for options, status, messages in (
        ({"model": "other"}, 404, ("other", server.model)),
        ({"truncate": False}, 400, ("402", "256")),
    ):
        with raises(ollama.ResponseError, *messages) as errors:
            embed(**{"model": server.model, "input": LONG} | options)
        assert errors[0].status_code == status
    with server.full(), raises(ollama.ResponseError, "try again later") as errors:
        embed(model=server.model, input=TEXTS)
    assert errors[0].status_code == 429
