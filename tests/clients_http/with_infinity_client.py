"""infinity-client, which LangChain's InfinityRerank uses."""

from infinity_client import Client
from infinity_client.api.default import rerank
from infinity_client.models import RerankInput, ReRankResult

from clients_http.server_under_test import DOCUMENTS, RERANK_QUERY, Server


def check_scores_are_those_of_grpc(server: Server) -> None:
    body = RerankInput(query=RERANK_QUERY, documents=DOCUMENTS, model="reranker", return_documents=True)
    with Client(base_url=server.reranker_url) as client:
        found = rerank.sync(client=client, body=body)
    assert isinstance(found, ReRankResult)
    server.check_ranking((each.index, each.relevance_score) for each in found.results)
    assert [each.document for each in found.results] == [DOCUMENTS[each.index] for each in found.results]
    assert found.usage.total_tokens > len(DOCUMENTS)


def check_errors_have_the_status_and_message(server: Server) -> None:
    with Client(base_url=server.reranker_url) as client:
        other = RerankInput(query=RERANK_QUERY, documents=DOCUMENTS, model="other")
        found = rerank.sync_detailed(client=client, body=other)
        assert found.status_code == 404
        assert b"other" in found.content
        with server.reranker.full():
            busy = RerankInput(query=RERANK_QUERY, documents=DOCUMENTS)
            found = rerank.sync_detailed(client=client, body=busy)
        assert found.status_code == 429
        assert b"try again later" in found.content
