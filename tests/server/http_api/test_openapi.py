"""The OpenAPI document is valid, and the routes keep to it for any body."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openapi_spec_validator import validate

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_server.http_api.exchange import EMBED, NATIVE, HttpRequest, HttpResponse, Route
from attnlens_server.http_api.openapi import OpenApiRoutes, proto_comments
from mounted import PREFIX, Mounted

NATIVE_ROUTES = ("embed", "encode", "encode_stream", "tokenize", "explain", "compare", "attention")
OTHERS = ("/v1/embeddings", "/", "/embed_all", "/similarity", "/tokenize", "/decode", "/v2/embed", "/vectors")
HEADS = ("/rerank", "/v1/rerank", "/v2/rerank", "/predict", "/score", "/classify")
POSTED = (*OTHERS, *HEADS, "/api/embed", *(f"/v1/attnlens/{name}" for name in NATIVE_ROUTES))
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 1 << 64) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=5), values, max_size=2),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def document(mounted: Mounted) -> dict[str, Any]:
    response = mounted.ask("GET", "/openapi.json", Authorization="")
    assert response.status == 200
    content: dict[str, Any] = response.json
    return content


def test_document_is_valid(document: dict[str, Any]) -> None:
    validate(document)
    assert document["openapi"] == "3.1.0"
    assert document["servers"] == [{"url": PREFIX}]


def test_all_routes_but_those_of_pages_are_described(document: dict[str, Any]) -> None:
    paths = {*POSTED, "/embeddings", "/v1/models", "/v1/models/{name}", "/healthz", "/readyz"}
    paths |= {"/v1/attnlens/models", "/v1/attnlens/models/{name}"}
    assert paths <= document["paths"].keys()
    assert not {"/page", "/docs", "/vectors/"} & document["paths"].keys()
    assert list(document["paths"]["/"]) == ["post"]
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert all(operation["summary"].endswith(".") for operation in operations)
    assert len({operation["operationId"] for operation in operations}) == len(operations)


def test_all_fields_of_messages_are_described(document: dict[str, Any]) -> None:
    schemas = {name: schema for name, schema in document["components"]["schemas"].items() if "v1." in name}
    assert len(schemas) > 40
    for name, schema in schemas.items():
        assert schema["description"], name
        for field, described in schema.get("properties", {}).items():
            assert described["description"], f"{name}.{field}"
    pooling = schemas["attnlens.v1.Pooling"]
    assert "mean" in pooling["enum"]
    assert "\n- `cls`: Vector of the first token: h(1)." in pooling["description"]


def test_comments_of_all_fields_are_found() -> None:
    comments = proto_comments()
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        assert comments[message.name], message.name
        assert all(comments[f"{message.name}.{field.name}"] for field in message.fields), message.name


def test_keys_are_part_of_the_document(document: dict[str, Any]) -> None:
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert document["paths"]["/v1/attnlens/embed"]["post"]["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/healthz"]["get"]


async def test_schemas_may_be_given_as_json() -> None:
    async def handler(_: HttpRequest) -> HttpResponse:
        """Return something."""
        return HttpResponse()

    schema = {"type": "object"}
    api = OpenApiRoutes(
        [Route("POST", "/x", handler, NATIVE, EMBED, body=schema, response=schema)], needs_key=False
    )
    request = HttpRequest("GET", "/openapi.json", {}, b"", Any)  # type: ignore[arg-type]
    body = (await api.document(request)).body
    assert isinstance(body, bytes)
    content = json.loads(body)
    validate(content)
    assert content["servers"] == [{"url": "/"}]
    operation = content["paths"]["/x"]["post"]
    assert operation["summary"] == "Return something."
    assert operation["requestBody"]["content"]["application/json"]["schema"] == schema


class Values:
    """Strategies for the values that the schemas of a document allow."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._schemas = document["components"]["schemas"]
        self._by_name: dict[str, st.SearchStrategy[Any]] = {}

    def of(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        match schema:
            case {"$ref": reference}:
                return self._named(reference.rpartition("/")[2])
            case {"enum": options}:
                return st.sampled_from(options)
            case {"anyOf": options}:
                return st.one_of([self.of(option) for option in options])
            case {"type": "array", "items": items}:
                return st.lists(self.of(items), min_size=schema.get("minItems", 0), max_size=2)
            case {"type": "object", "properties": fields}:
                return self._object(fields, schema)
        return self._scalar(schema)

    def _named(self, name: str) -> st.SearchStrategy[Any]:
        if name not in self._by_name:  # a schema may refer to itself
            self._by_name[name] = st.deferred(lambda: self.of(self._schemas[name]))
        return self._by_name[name]

    def _object(self, fields: dict[str, Any], schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        values = {name: self.of(field) for name, field in fields.items()}
        if schema.get("maxProperties") == 1:
            return st.one_of([st.fixed_dictionaries({name: value}) for name, value in values.items()])
        required = {name: values.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(required, optional=values)

    def _scalar(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        limits = (schema.get("minimum", -(1 << 63)), schema.get("maximum", (1 << 63) - 1))
        kinds: dict[str, st.SearchStrategy[Any]] = {
            "string": st.text(max_size=20),
            "integer": st.integers(-4, 4) | st.integers(*limits),
            "number": st.floats(0, 1) | st.floats(allow_nan=False, allow_infinity=False),
            "boolean": st.booleans(),
            "null": st.none(),
        }
        if "type" not in schema:
            return JUNK
        kind = schema["type"]
        return st.one_of([kinds[each] for each in ([kind] if isinstance(kind, str) else kind)])


def mutated(value: Any, choose: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """Return a value with junk in one random position."""
    keys = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    if not keys or choose(st.integers(0, 2)) == 0:
        return choose(JUNK)
    key = choose(st.sampled_from(keys))
    copy = value.copy()
    copy[key] = mutated(value[key], choose)
    return copy


def check_schema(content: Any, schema: dict[str, Any], document: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(content)


@pytest.fixture(scope="module")
def values(document: dict[str, Any]) -> Values:
    return Values(document)


def check_response(
    mounted: Mounted, document: dict[str, Any], values: Values, path: str, data: st.DataObject
) -> None:
    """Check the response to a random body that the document allows, or a similar one."""
    operation = document["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    body = data.draw(values.of(schema), label="body")
    if data.draw(st.booleans()):
        body = mutated(body, data.draw)
    response = mounted.ask("POST", path, body)
    assert response.status < 500, response.body
    documented = operation["responses"]["200" if response.status == 200 else "4XX"]["content"]
    media_type = response.headers["content-type"]
    assert media_type in documented
    lines = response.body.splitlines() if media_type.endswith("ndjson") else [response.body]
    for line in lines:
        check_schema(json.loads(line), documented[media_type]["schema"], document)


@pytest.mark.parametrize("path", POSTED)
@settings(max_examples=12)
@given(st.data())
def test_responses_to_any_body_conform(
    mounted: Mounted, document: dict[str, Any], values: Values, path: str, data: st.DataObject
) -> None:
    check_response(mounted, document, values, path, data)


@pytest.fixture(scope="module")
def reranker(classifier_bundle: Callable[[str], Path]) -> Iterator[Mounted]:
    with Mounted(classifier_bundle("reranker")) as mounted:
        yield mounted


@pytest.mark.parametrize("path", ["/", *HEADS])
@settings(max_examples=25)
@given(st.data())
def test_responses_of_a_reranker_conform(reranker: Mounted, path: str, data: st.DataObject) -> None:
    document = reranker.ask("GET", "/openapi.json").json
    check_response(reranker, document, Values(document), path, data)


@pytest.mark.parametrize(
    "path", ["/healthz", "/v1/models", "/v1/attnlens/models", "/v1/models/{name}", "/info", "/meta"]
)
def test_responses_without_a_body_conform(mounted: Mounted, document: dict[str, Any], path: str) -> None:
    response = mounted.ask("GET", path.replace("{name}", "other"))
    documented = document["paths"][path]["get"]["responses"]["4XX" if "{" in path else "200"]
    check_schema(response.json, documented["content"]["application/json"]["schema"], document)
