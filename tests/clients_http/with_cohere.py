"""cohere."""

import asyncio
from typing import Any

import cohere
import numpy as np

from clients_http.server_under_test import DIMENSIONS, LONG, TEXTS, Server, raises


def options(server: Server, **others: Any) -> dict[str, Any]:
    return {"model": server.model, "texts": TEXTS, "input_type": "search_document"} | others


def check_vectors_are_those_of_grpc(server: Server) -> None:
    embed = cohere.ClientV2("-", base_url=server.url).embed
    found = embed(**options(server, embedding_types=["float", "binary"]))
    server.check(found.embeddings.float_, "texts")
    assert found.texts == TEXTS
    bits = np.packbits(np.array(server.vectors["texts"]) > 0, axis=1).astype(int) - 128
    assert found.embeddings.binary == bits.tolist()
    short = embed(**options(server, embedding_types=["float"], output_dimension=DIMENSIONS))
    server.check(short.embeddings.float_, "short")
    server.check(embed(**options(server, texts=[LONG], truncate="END")).embeddings.float_, "long")


def check_asynchronous_client(server: Server) -> None:
    async def main() -> Any:
        return await cohere.AsyncClientV2("-", base_url=server.url).embed(**options(server))

    server.check(asyncio.run(main()).embeddings.float_, "texts")


def check_errors_are_those_of_the_client(server: Server) -> None:
    embed = cohere.ClientV2("-", base_url=server.url).embed
    with raises(cohere.NotFoundError, "other", server.model):
        embed(**options(server, model="other"))
    with raises(cohere.BadRequestError, "402", "256"):
        embed(**options(server, texts=[LONG], truncate="NONE"))
    with server.full(), raises(cohere.TooManyRequestsError, "try again later"):
        embed(**options(server), request_options={"max_retries": 0})
