"""Rules of all routes and bodies, checked for each field of the OpenAPI document and each known option."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnlens_server.http_api import known_options
from attnlens_server.http_api.known_options import Options
from http_client import HeadServer, HttpClient

EMBED, HEAD, TEXTS = {"inputs": ["the man"]}, {"query": "the man"}, ["the sea", "the man"]
NATIVE: dict[str, dict[str, Any]] = {
    "embed": EMBED,
    "encode": EMBED,
    "tokenize": EMBED,
    "explain": EMBED,
    "attention": EMBED,
    "compare": {"pairs": [{"a": "the man", "b": "the sea"}]},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": TEXTS},
    "/embeddings": {"input": TEXTS},
    "/embed": EMBED,
    "/embed_all": EMBED,
    "/similarity": {"inputs": {"source_sentence": "the man", "sentences": TEXTS}},
    "/tokenize": EMBED,
    "/decode": {"ids": [[101, 102]]},
    "/v2/embed": {"texts": TEXTS},
    "/vectors": {"texts": TEXTS},
    "/api/embed": {"input": TEXTS},
    **{f"/v1/attnlens/{name}": body for name, body in NATIVE.items()},
}
RERANK_BODIES: dict[str, dict[str, Any]] = {
    "/": HEAD | {"texts": TEXTS},
    "/rerank": HEAD | {"documents": TEXTS},
    "/v1/rerank": HEAD | {"documents": TEXTS},
    "/v2/rerank": HEAD | {"documents": TEXTS},
    "/score": {"text_1": "the man", "text_2": TEXTS},
    "/v1/score": {"text_1": "the man", "text_2": TEXTS},
    "/predict": {"inputs": ["the man", "the sea"]},
    "/classify": {"input": TEXTS},
    "/v1/attnlens/score": HEAD | {"documents": TEXTS},
    "/v1/attnlens/classify": {"inputs": [{"text_pair": {"first": "the man", "second": "the sea"}}]},
}
OPTIONS: dict[str, Options] = {
    "/v1/embeddings": known_options.OPENAI_EMBEDDINGS,
    "/v2/embed": known_options.COHERE_EMBED,
    "/api/embed": known_options.OLLAMA_EMBED,
    "/embed": known_options.TEI_EMBED,
    "/embed_all": known_options.TEI_EMBED_ALL,
    "/rerank": known_options.RERANK,
    "/v2/rerank": known_options.RERANK,
    "/score": known_options.VLLM_SCORE,
    "/classify": known_options.VLLM_CLASSIFY,
}
LONG_NAME = "x" * 5_000
ANY_VALUE = [0, -1, False, "unusual", {"key": [1]}, []]


class Server:
    """A server and the schemas of its bodies."""

    def __init__(self, http: HttpClient) -> None:
        self.http = http
        status, self._document = http.ask("GET", "/openapi.json")
        assert status == 200

        self.paths: dict[str, Any] = self._document["paths"]

    def body(self, path: str) -> dict[str, Any]:
        """Return the schema of the body of a route."""
        operation = self.paths[path]["post"]
        schema: dict[str, Any] = operation["requestBody"]["content"]["application/json"]["schema"]
        return schema

    @property
    def posted(self) -> set[str]:
        """Routes with a body."""
        return {path for path, methods in self.paths.items() if "requestBody" in methods.get("post", {})}

    def options(self, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the alternatives of a schema, without references."""
        if "$ref" in schema:
            schema = self._document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        alternatives = schema.get("anyOf")
        if alternatives is None:
            yield schema
        for alternative in alternatives or ():
            yield from self.options(alternative)

    def fields(self, schema: dict[str, Any], seen: tuple[Any, ...] = ()) -> Iterator[tuple[str, bool, Any]]:
        """Yield the path of each field, such as `.inputs[].text`, whether it is required, and its schema."""
        for option in self.options(schema):
            if option in seen:
                continue
            if "items" in option:
                yield from (
                    (f"[]{path}", *rest) for path, *rest in self.fields(option["items"], (*seen, option))
                )
            is_choice = (
                option.get("maxProperties") == 1
            )  # of one field, which is neither required nor optional
            for name, field in option.get("properties", {}).items():
                yield f".{name}", is_choice or name in option.get("required", ()), field
                yield from ((f".{name}{path}", *rest) for path, *rest in self.fields(field, (*seen, option)))

    def allows_null(self, schema: dict[str, Any]) -> bool:
        """Return whether a schema allows null."""
        return any(
            not option.keys() - {"default", "description"}
            or option.get("type") == "null"
            or None in option.get("enum", ())
            for option in self.options(schema)
        )

    def enum(self, schema: dict[str, Any]) -> tuple[set[str], bool]:
        """Return the strings that a field, or each element of a list, may have, and whether it is a list."""
        options = list(self.options(schema))
        items = [option["items"] for option in options if "items" in option]
        found = {value for option in options for value in option.get("enum", ()) if isinstance(value, str)}
        if found or not items:
            return found, False
        found = {value for option in self.options(items[0]) for value in option.get("enum", ())}
        return found, True

    def objects(self, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the properties of a field that is an object, if it is one."""
        yield from (option["properties"] for option in self.options(schema) if "properties" in option)


@pytest.fixture(scope="module")
def servers(http: HttpClient, reranker: HeadServer) -> dict[str, Server]:
    """Return the server of each route."""
    embedder, ranker = Server(http), Server(reranker.http)
    return dict.fromkeys(BODIES, embedder) | dict.fromkeys(RERANK_BODIES, ranker)


def answer(server: Server, path: str, body: Any) -> tuple[int, str]:
    """Return the status and the body of a response, without what differs each time."""
    status, value = server.http.ask("POST", path, body)
    if isinstance(value, dict):
        value = {
            key: each
            for key, each in value.items()
            if key not in ("id", "created", "total_duration", "timings")
        }
    return status, str(value)


ALL = BODIES | RERANK_BODIES


def test_each_route_with_a_body_has_a_case(servers: dict[str, Server]) -> None:
    routes = {path for server in servers.values() for path in server.posted}
    assert routes == ALL.keys() | {"/v1/attnlens/encode_stream"}  # with the body of encode


@pytest.mark.parametrize("path", ALL)
def test_null_of_an_optional_field_is_the_same_as_no_value(path: str, servers: dict[str, Server]) -> None:
    server, body = servers[path], ALL[path]
    schema = server.body(path)
    fields = list(server.fields(schema))
    assert [
        name for name, is_required, field in fields if not is_required and not server.allows_null(field)
    ] == []
    [properties] = server.objects(schema)
    expected = answer(server, path, body)
    assert expected[0] == 200, expected
    assert answer(server, path, dict.fromkeys(properties) | body) == expected
    for name in properties.keys() - body.keys():
        for inner in server.objects(properties[name]):  # of an option that is an object
            empty = answer(server, path, {**body, name: {}})
            assert answer(server, path, {**body, name: dict.fromkeys(inner)}) == empty, name


@pytest.mark.parametrize("path", ALL)
def test_an_unknown_value_of_an_enum_is_rejected_with_all_known_ones(
    path: str, servers: dict[str, Server]
) -> None:
    server, body = servers[path], ALL[path]
    [properties] = server.objects(server.body(path))
    for name, field in properties.items():
        known, is_list = server.enum(field)
        if not known:
            continue
        wrong = f"nonsense{LONG_NAME}"  # which is shortened, so that the known ones are still listed
        status, value = server.http.ask("POST", path, {**body, name: [wrong] if is_list else wrong})
        assert status in (400, 422), (name, value)
        message = str(value)
        assert name in message
        assert "nonsense" in message
        assert all(each in message for each in known), (name, message)


@pytest.mark.parametrize("path", ALL)
def test_errors_do_not_echo_long_values(path: str, servers: dict[str, Server]) -> None:
    server, body = servers[path], ALL[path]
    [properties] = server.objects(server.body(path))
    long: list[Any] = [LONG_NAME, [{LONG_NAME: LONG_NAME}], 10**400]
    for name in (*properties, LONG_NAME):
        for value in long:
            status, found = server.http.ask("POST", path, {**body, name: value})
            assert status < 500, (name[:40], found)
            assert status == 200 or len(str(found)) < 4096, name[:40]


def known() -> Iterator[tuple[str, str, tuple[Any, ...] | None]]:
    for path, options in OPTIONS.items():
        yield from ((path, name, values) for name, values in options.items())


def test_each_table_of_options_has_a_route() -> None:
    tables = [
        table
        for name, table in vars(known_options).items()
        if name.isupper() and name[0] != "_" and name != "REPLACEMENTS"
    ]
    assert tables
    assert all(any(table is used for used in OPTIONS.values()) for table in tables)


def test_the_page_lists_all_known_options() -> None:
    page = (Path(__file__).parents[3] / "docs" / "http.md").read_text("utf-8")
    section = page.partition("## Options of other servers")[2].partition("\n## ")[0]
    assert [name for _, name, _ in known() if not re.search(rf"`{name}\b", section)] == []


@pytest.mark.parametrize(("path", "name", "values"), list(known()))
def test_a_known_option_is_accepted_only_if_the_result_is_the_same(
    path: str, name: str, values: tuple[Any, ...] | None, servers: dict[str, Server]
) -> None:
    server, body = servers[path], ALL[path]
    expected = answer(server, path, body)
    assert expected[0] == 200
    for value in ANY_VALUE if values is None else values:
        assert answer(server, path, {**body, name: value}) == expected
    for value in ("unusual", 12345, [1], {"a": 1}) if values is not None else ():
        status, found = answer(server, path, {**body, name: value})
        assert status in (400, 422), value
        shown = {"unusual": "unusual", "12345": "12345"}.get(str(value), "")
        assert f"{name} is {shown}" in found
        for same in values or ():
            assert str(same).lower().replace("'", '"') in found


@pytest.mark.parametrize("path", ALL)
def test_unknown_keys_are_ignored_except_by_the_routes_of_attnlens(
    path: str, servers: dict[str, Server]
) -> None:
    server, body = servers[path], ALL[path]
    status, found = server.http.ask("POST", path, {**body, "unknown_key": 1})
    assert status == (400 if path.startswith("/v1/attnlens/") else 200), found


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        (
            "POST",
            "/v1/embedings",
            404,
            "POST /v1/embedings is not a route: the nearest route is POST /v1/embeddings",
        ),
        ("POST", "/v1/embed", 404, "POST /v1/embed is not a route: the nearest route is "),
        (
            "GET",
            "/helth",
            404,
            "GET /helth is not a route: the nearest route is GET /health, and /docs lists all",
        ),
        ("GET", "/" + "z" * 5000, 404, f"GET /{'z' * 63} is not a route: /docs lists all routes"),
        ("GET", "/v1/embeddings", 405, "GET /v1/embeddings is not a route: use POST"),
        ("DELETE", "/v1/models", 405, "DELETE /v1/models is not a route: use GET"),
    ],
)
def test_an_unknown_route_is_named_with_the_nearest_one(
    method: str, path: str, status: int, message: str, http: HttpClient
) -> None:
    found, value = http.ask(method, path)
    assert found == status
    assert value["error"].startswith(message)


def test_the_document_begins_with_embeddings_and_ends_with_health_checks(servers: dict[str, Server]) -> None:
    paths = list(servers["/v1/embeddings"].paths)
    assert paths[0] == "/v1/embeddings"
    assert paths[-3:] == ["/healthz", "/readyz", "/metrics"]


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        (
            "/v2/embed",
            {"max_tokens": 9},
            "max_tokens is 9, and only the limit of the model is supported: use 256 or",
        ),
        (
            "/api/embed",
            {"options": {"num_ctx": 9}},
            "options.num_ctx is 9, and only the limit of the model is",
        ),
        (
            "/vectors",
            {"config": {"pooling_strategy": "cls"}},
            "config.pooling_strategy is cls, but the model uses mean",
        ),
        (
            "/vectors",
            {"config": {"task_type": "nonsense"}},
            "config.task_type is nonsense: use one of query, ",
        ),
        (
            "/v1/rerank",
            {"truncate_prompt_tokens": 4},
            "truncate_prompt_tokens is 4, and only the limit of the model",
        ),
        (
            "/score",
            {"truncate_prompt_tokens": 4},
            "truncate_prompt_tokens is 4, and only the limit of the model",
        ),
        (
            "/classify",
            {"truncate_prompt_tokens": 4},
            "truncate_prompt_tokens is 4, and only the limit of the model",
        ),
        ("/v1/rerank", {"top_n": 1, "top_k": 2}, "top_k is 2, but top_n is 1: send one of them"),
        ("/v1/rerank", {"truncate": True, "truncation": False}, "truncation is false, but truncate is true"),
        (
            "/score",
            {"raw_scores": True, "activation": True},
            "raw_scores contradicts use_activation: send one",
        ),
        (
            "/rerank",
            {"property": "p", "relevant_spans": {}},
            "relevant_spans is not part of the APIs of TEI and",
        ),
    ],
)
def test_an_option_that_the_model_does_not_have_is_rejected(
    path: str, options: dict[str, Any], message: str, servers: dict[str, Server]
) -> None:
    status, found = servers[path].http.ask("POST", path, {**ALL[path], **options})
    assert status in (400, 422)
    error = found.get("error", found.get("message"))
    assert (error["message"] if isinstance(error, dict) else error).startswith(message)


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/v2/embed", {"max_tokens": 256}),
        ("/api/embed", {"options": {"num_ctx": 8192, "temperature": 0.5}}),
        ("/vectors", {"config": {"pooling_strategy": "masked_mean"}}),
        ("/v1/rerank", {"truncate_prompt_tokens": -1, "truncation_side": "left", "top_n": 0}),
        ("/score", {"truncate_prompt_tokens": -1, "truncation_side": "left"}),
        ("/classify", {"truncate_prompt_tokens": -1}),
    ],
)
def test_an_option_with_the_value_of_the_model_is_accepted(
    path: str, options: dict[str, Any], servers: dict[str, Server]
) -> None:
    expected = answer(servers[path], path, ALL[path])
    assert answer(servers[path], path, {**ALL[path], **options}) == expected
    assert expected[0] == 200


def test_documents_are_not_truncated_on_the_left(servers: dict[str, Server]) -> None:
    for path, long in (("/v1/rerank", "documents"), ("/score", "text_2"), ("/rerank", "documents")):
        body = {**ALL[path], long: ["the man " * 50], "truncation_side": "left"}
        status, found = servers[path].http.ask("POST", path, body)
        assert status in (400, 422)
        assert "truncation_side needs truncation on the left, but this model truncates on the right" in str(
            found
        )
