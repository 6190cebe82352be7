"""Rerank postprocessors of LlamaIndex for TEI, Jina and Cohere."""

from typing import Any

import cohere
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

from clients_http.server_under_test import DOCUMENTS, RERANK_QUERY, Server, raises


def ranking(postprocessor: Any) -> list[tuple[int, float]]:
    nodes = [NodeWithScore(node=TextNode(text=text, id_=str(index))) for index, text in enumerate(DOCUMENTS)]
    found = postprocessor.postprocess_nodes(nodes, query_str=RERANK_QUERY)
    assert len(found) == 3
    return [(int(each.node_id), each.score) for each in found]


def jina(server: Server, model: str = "reranker") -> JinaRerank:
    return JinaRerank(top_n=3, model=model, base_url=f"{server.reranker_url}/v1", api_key="-")


def check_scores_are_those_of_grpc(server: Server) -> None:
    url = server.reranker_url
    server.check_ranking(ranking(TextEmbeddingInference(top_n=3, base_url=url)))
    server.check_ranking(ranking(jina(server)))
    server.check_ranking(ranking(CohereRerank(top_n=3, model="reranker", api_key="-", base_url=url)))


def check_errors_have_our_messages(server: Server) -> None:
    with raises(RuntimeError, "other", "reranker"):
        ranking(jina(server, "other"))
    with server.reranker.full(), raises(RuntimeError, "try again later"):
        ranking(jina(server))
    with raises(cohere.NotFoundError, "other"):
        ranking(CohereRerank(top_n=3, model="other", api_key="-", base_url=server.reranker_url))


def check_errors_are_lost_in_the_client_of_tei(server: Server) -> None:
    """The client ignores the status and expects as many results as documents."""
    with server.reranker.full(), raises(AssertionError):
        ranking(TextEmbeddingInference(top_n=3, base_url=server.reranker_url))
