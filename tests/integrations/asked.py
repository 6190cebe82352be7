"""Run the integration recipes in their environment: `python asked.py ADDRESS VECTORS RESULTS`.

Runs each recipe as a user would, and makes additional calls to each adapter. Writes printed and returned
values to the JSON file RESULTS, keyed by recipe name.
"""

import asyncio
import contextlib
import importlib
import io
import json
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parents[2] / "examples" / "integrations"
sys.path.insert(0, str(RECIPES))

QUERY = "How do I reset a forgotten password?"
TEXTS = ["It rained.", "", "Naïve café 😀 " * 200]


def main(address: str, vectors: str, results: str) -> None:
    answers = {
        "with_langchain": langchain(address),
        "with_llama_index": llama_index(address),
        "with_haystack": haystack(address),
        "with_chroma": chroma(address),
        "with_lancedb": lance(address),
        "with_duckdb": duck(address, vectors),
        "with_pgvector": postgres(address),
    }
    Path(results).write_text(json.dumps(answers, default=lambda array: array.tolist()), encoding="utf-8")


def printed(recipe: str, *args: str) -> str:
    output = io.StringIO()
    sys.argv = [recipe, *args]
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(RECIPES / f"{recipe}.py"), run_name="__main__")
    return output.getvalue()


def langchain(address: str) -> dict[str, Any]:
    embeddings = importlib.import_module("with_langchain").AttnlensEmbeddings(address)

    async def together() -> list[Any]:
        return list(await asyncio.gather(embeddings.aembed_query(QUERY), embeddings.aembed_documents(TEXTS)))

    return {
        "printed": printed("with_langchain", address, QUERY),
        "query": embeddings.embed_query(QUERY),
        "texts": embeddings.embed_documents(TEXTS),
        "together": asyncio.run(together()),
        "nothing": embeddings.embed_documents([]),
    }


def llama_index(address: str) -> dict[str, Any]:
    embedding = importlib.import_module("with_llama_index").AttnlensEmbedding(address=address)

    async def together() -> list[Any]:
        return list(
            await asyncio.gather(
                embedding.aget_query_embedding(QUERY), embedding.aget_text_embedding_batch(TEXTS)
            )
        )

    return {
        "printed": printed("with_llama_index", address, QUERY),
        "query": embedding.get_query_embedding(QUERY),
        "texts": embedding.get_text_embedding_batch(TEXTS),
        "together": asyncio.run(together()),
        "nothing": embedding.get_text_embedding_batch([]),
        "stored": embedding.to_dict(),
    }


def haystack(address: str) -> dict[str, Any]:
    from haystack import Document, Pipeline  # noqa: PLC0415 - installed in this environment only

    recipe = importlib.import_module("with_haystack")
    pipeline = Pipeline()
    pipeline.add_component("embedder", recipe.AttnlensTextEmbedder(address))
    read_again = Pipeline.loads(pipeline.dumps(), allowed_modules=["with_haystack"])
    given = [Document(content=text, meta={"place": place}) for place, text in enumerate([*TEXTS, None])]
    documents = recipe.AttnlensDocumentEmbedder(address).run(given)["documents"]
    return {
        "printed": printed("with_haystack", address, QUERY),
        "query": read_again.run({"embedder": {"text": QUERY}})["embedder"]["embedding"],
        "texts": [document.embedding for document in documents[:-1]],
        "places": [document.meta["place"] for document in documents],
        "given": [document.embedding for document in given],
        "nothing": recipe.AttnlensDocumentEmbedder(address).run([])["documents"],
    }


def chroma(address: str) -> dict[str, Any]:
    import chromadb  # noqa: PLC0415

    recipe = importlib.import_module("with_chroma")
    settings = chromadb.Settings(anonymized_telemetry=False)
    with tempfile.TemporaryDirectory() as directory:
        database = chromadb.PersistentClient(directory, settings)
        function = recipe.AttnlensEmbeddingFunction(address)
        database.create_collection("texts", embedding_function=function).add(["a", "b", "c"], documents=TEXTS)
        # The collection stores its embedding function.
        found = database.get_collection("texts").query(query_texts=["It was raining."], n_results=1)
    return {
        "printed": printed("with_chroma", address, QUERY),
        "query": function.embed_query([QUERY])[0],
        "texts": function(TEXTS),
        "found": found["documents"],
    }


def lance(address: str) -> dict[str, Any]:
    import lancedb  # noqa: PLC0415
    from lancedb.embeddings import EmbeddingFunctionConfig, get_registry  # noqa: PLC0415

    importlib.import_module("with_lancedb")
    function = get_registry().get("attnlens").create(address=address)
    config = EmbeddingFunctionConfig(source_column="text", vector_column="vector", function=function)
    with tempfile.TemporaryDirectory() as directory:
        rows = [{"text": text, "place": place} for place, text in enumerate(TEXTS)]
        lancedb.connect(directory).create_table("texts", rows, embedding_functions=[config])
        table = lancedb.connect(directory).open_table("texts")
        texts = [row["vector"] for row in table.search().to_list()]
        found = table.search("It was raining.").where("place > 0").limit(1).to_list()
    return {
        "printed": printed("with_lancedb", address, QUERY),
        "query": function.compute_query_embeddings(QUERY)[0],
        "texts": texts,
        "found": found[0]["place"],
    }


def duck(address: str, vectors: str) -> dict[str, Any]:
    import duckdb  # noqa: PLC0415

    recipe = importlib.import_module("with_duckdb")
    corpus = RECIPES / "corpus.jsonl"
    with tempfile.TemporaryDirectory() as directory:
        longer = Path(directory) / "longer.jsonl"
        longer.write_text(corpus.read_text("utf-8") + '{"text": "One more.", "topic": "new"}\n', "utf-8")
        try:
            recipe.load(duckdb.connect(), str(longer), vectors)
            refused = ""
        except Exception as error:  # noqa: BLE001 - the test looks at it
            refused = str(error)
    return {"printed": printed("with_duckdb", address, QUERY, str(corpus), vectors), "refused": refused}


def postgres(address: str, *, retries: int = 1) -> dict[str, Any]:
    import pgserver  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as directory:
        try:
            server = pgserver.get_server(directory, cleanup_mode="stop")
        except (OSError, subprocess.SubprocessError):  # pg_ctl sometimes aborts on a busy machine
            if not retries:
                raise
            return postgres(address, retries=retries - 1)
        try:
            return {"printed": printed("with_pgvector", address, QUERY, server.get_uri())}
        finally:
            server.cleanup()


if __name__ == "__main__":
    main(*sys.argv[1:])
