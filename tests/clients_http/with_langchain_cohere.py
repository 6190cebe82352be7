"""CohereRerank of LangChain."""

import cohere
from langchain_cohere import CohereRerank
from langchain_core.documents import Document

from clients_http.server_under_test import DOCUMENTS, RERANK_QUERY, Server, raises


def reranker(server: Server, model: str = "reranker") -> CohereRerank:
    return CohereRerank(model=model, cohere_api_key="-", base_url=server.reranker_url)


def check_scores_are_those_of_grpc(server: Server) -> None:
    found = reranker(server).rerank(DOCUMENTS, RERANK_QUERY, top_n=None)
    server.check_ranking((each["index"], each["relevance_score"]) for each in found)
    documents = [Document(text, metadata={"index": index}) for index, text in enumerate(DOCUMENTS)]
    compressed = reranker(server).compress_documents(documents, RERANK_QUERY)
    assert len(compressed) == 3
    server.check_ranking((each.metadata["index"], each.metadata["relevance_score"]) for each in compressed)


def check_errors_are_those_of_cohere(server: Server) -> None:
    with raises(cohere.NotFoundError, "other", "reranker"):
        reranker(server, "other").rerank(DOCUMENTS, RERANK_QUERY)
