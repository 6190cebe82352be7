"""Requests to the HTTP routes, and calls of the Open Inference Protocol.

Bodies are those of each API's documentation with some fields changed. Tables map a path to its bodies.
"""

import base64
from typing import Any

from recorded_requests.native import BYTES, LONG, OTHER, TEXT

Bodies = dict[str, list[Any]]

TEI_OPTIONS: list[Any] = [
    {"truncate": False},
    {"truncation_direction": "Left"},
    {"truncation_direction": "Up"},
    {"prompt_name": "none"},
    {"other": 1},
]
_LONG_OPTIONS = [{}, *TEI_OPTIONS[:2]]


def _with(field: str, value: Any, options: list[Any]) -> list[Any]:
    return [{field: value, **each} for each in options]


EMBEDDINGS: list[Any] = [
    {"input": TEXT},
    {"input": [TEXT, OTHER], "model": "all-MiniLM-L6-v2", "encoding_format": "base64", "user": "u"},
    {"input": [[101, 7, 102], [101, 8, 102]]},
    {"input": [101, 7, 102]},
    {"input": [101, -1]},
    {"input": [TEXT, 7]},
    {"input": []},
    {"input": ""},
    {"input": ["a"] * 9},
    {"input": [TEXT, LONG]},
    {"input": LONG, "truncate": True},
    {"input": LONG, "truncate_prompt_tokens": -1},
    {"input": LONG, "truncate_prompt_tokens": 3},
    {"input": LONG, "truncate_prompt_tokens": -1, "truncation_side": "left"},
    {"input": BYTES},
    {"input": TEXT, "model": "none"},
    {"input": TEXT, "dimensions": 8},
    {"input": TEXT, "dimensions": 0},
    {"input": TEXT, "dimensions": 100_000},
    {"input": TEXT, "dimensions": 8, "output_dimension": 9},
    {"input": TEXT, "normalize": False, "normalized": True},
    {"input": TEXT, "prompt_name": "none"},
    {"input": TEXT, "input_type": "query"},
    {"input": TEXT, "input_type": "none"},
    {"input": TEXT, "task": "retrieval.passage", "input_type": "query"},
    {"input": TEXT, "messages": []},
    {"input": TEXT, "output_dtype": "int8"},
    {"input": TEXT, "encoding_format": "hex"},
    {"input": 7},
    {},
]
EMBEDDER: Bodies = {
    "/v1/embeddings": EMBEDDINGS,
    "/embeddings": EMBEDDINGS[:1],
    "/embed": [
        *({"inputs": TEXT, **each} for each in ({}, *TEI_OPTIONS)),
        *_with("inputs", LONG, _LONG_OPTIONS),
        {"inputs": [TEXT, OTHER], "normalize": False, "dimensions": 8},
        {"inputs": TEXT, "dimensions": 100_000},
        {"inputs": []},
        {"inputs": ["a"] * 9},
        {"inputs": [[101, 7, 102]]},
        {"inputs": 7},
        {},
    ],
    "/": [{"inputs": TEXT}],
    "/embed_all": [
        {"inputs": TEXT},
        {"inputs": [TEXT, LONG], "truncate": False},
        {"inputs": TEXT, "dimensions": 8},
    ],
    "/embed_sparse": [{"inputs": TEXT}],
    "/similarity": [
        {"inputs": {"source_sentence": TEXT, "sentences": [OTHER, TEXT]}},
        {"inputs": {"source_sentence": TEXT, "sentences": []}},
        {"inputs": {"source_sentence": TEXT, "sentences": ["a"] * 8}},
        {"inputs": {"source_sentence": LONG, "sentences": [OTHER]}, "parameters": {"truncate": False}},
        {"inputs": TEXT},
    ],
    "/tokenize": [
        {"inputs": TEXT},
        {"inputs": [TEXT, OTHER], "add_special_tokens": False},
        {"inputs": [TEXT], "prompt_name": "none"},
        {"inputs": []},
    ],
    "/decode": [
        {"ids": [101, 2023, 102]},
        {"ids": [[101, 2023], [7]], "skip_special_tokens": False},
        {"ids": [-1]},
    ],
    "/predict": [{"inputs": TEXT}],
    "/rerank": [{"query": TEXT, "texts": [OTHER]}, {"query": TEXT, "documents": [OTHER]}],
    "/v2/embed": [
        {"texts": [TEXT, OTHER], "model": "all-MiniLM-L6-v2", "input_type": "search_query"},
        {"texts": [TEXT], "embedding_types": ["float", "int8", "uint8", "binary", "ubinary"]},
        {"texts": [TEXT], "embedding_types": ["int8"], "output_dimension": 8},
        {"texts": [TEXT], "embedding_types": ["hex"]},
        *({"texts": [LONG], "truncate": side} for side in ("NONE", "START", "END")),
        {"texts": [TEXT], "max_tokens": 3},
        {"texts": [TEXT], "images": ["data:"]},
        {"texts": ["a"] * 9},
        {"texts": []},
        {},
    ],
    "/api/embed": [
        {"input": TEXT, "model": "all-MiniLM-L6-v2:latest"},
        {"input": [TEXT, LONG], "keep_alive": "5m"},
        {"input": LONG, "truncate": False},
        {"input": TEXT, "options": {"num_ctx": 8}},
        {"input": TEXT, "model": "none"},
        {"input": [], "dimensions": 8},
        {},
    ],
    "/vectors": [
        {"text": TEXT},
        {"texts": [TEXT, OTHER], "config": {"pooling_strategy": "masked_mean", "task_type": "query"}},
        {"text": TEXT, "config": {"pooling_strategy": "cls"}},
        {"text": TEXT, "config": {"task_type": "none"}},
        {"text": TEXT, "config": {"dimensions": -1}},
        {"text": TEXT, "texts": [TEXT]},
        {"texts": ["a"] * 9},
        {},
    ],
    "/vectors/": [{"text": TEXT}],
    "/page": [
        {"text": TEXT},
        {"text": TEXT, "other": OTHER},
        {"text": TEXT, "other": OTHER, "rather_than": "The sea."},
        {"text": TEXT, "rather_than": OTHER},
        {"text": TEXT, "other": OTHER, "rather_than": OTHER},
        {"text": LONG},
        {"text": TEXT, "other": LONG},
        {"other": OTHER},
        {"text": 7},
        {"text": TEXT, "extra": "a"},
    ],
    "/classify": [{"input": TEXT}],
    "/score": [{"text_1": TEXT, "text_2": OTHER}],
}
RERANK: list[Any] = [
    {"query": TEXT, "documents": [OTHER, "The sea."]},
    {
        "query": TEXT,
        "documents": [{"text": OTHER}],
        "return_documents": True,
        "model": "reranker",
        "top_n": 1,
    },
    {"query": {"text": TEXT}, "documents": [OTHER], "top_k": 1, "truncation": True},
    {"query": TEXT, "documents": [OTHER], "raw_scores": True, "return_documents": True},
    {"query": TEXT, "documents": [OTHER, TEXT], "relevant_spans": {}},
    {
        "query": TEXT,
        "documents": [OTHER],
        "relevant_spans": {"mode": "enabled", "threshold": 0.0, "max_spans": 1},
    },
    {"query": TEXT, "documents": [LONG]},
    {"query": TEXT, "documents": [LONG], "truncate": False},
    {"query": TEXT, "documents": [LONG], "truncation_side": "left"},
    {"query": "word " * 60, "documents": [OTHER]},
    {"query": TEXT, "documents": [OTHER], "max_tokens_per_doc": 1},
    {"query": TEXT, "documents": [OTHER], "top_n": 1, "top_k": 2},
    {"query": TEXT, "documents": [OTHER], "use_activation": True, "raw_scores": True},
    {"query": TEXT, "documents": [OTHER], "rank_fields": ["title"]},
    {"query": TEXT, "documents": [OTHER], "model": "none"},
    {"query": TEXT, "documents": ["a"] * 9},
    {"query": TEXT, "documents": []},
    {"query": TEXT},
    {"documents": [OTHER]},
]
RERANKER: Bodies = {
    "/rerank": [
        *RERANK,
        {"query": TEXT, "texts": [OTHER, "The sea."]},
        {"query": TEXT, "texts": [OTHER], "return_text": True, "raw_scores": True},
        {"query": TEXT, "texts": [OTHER, LONG], "truncate": False},
        {"query": TEXT, "texts": [LONG], "truncation_direction": "Left", "truncate": True},
        {"query": TEXT, "texts": []},
        {"query": TEXT, "texts": [OTHER], "documents": [OTHER]},
        {"query": TEXT, "texts": [OTHER], "relevant_spans": {}},
        {"query": TEXT, "documents": [OTHER, "a"], "property": "body"},
    ],
    "/": [{"query": TEXT, "texts": [OTHER]}],
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
    "/score": [
        {"text_1": TEXT, "text_2": [OTHER, "The sea."]},
        {"queries": [TEXT, "a"], "documents": [OTHER, "b"], "model": "reranker"},
        {"text_1": [TEXT, "a"], "text_2": [OTHER]},
        {"text_1": TEXT, "text_2": OTHER, "items": OTHER},
        {"text_1": TEXT, "text_2": ["a", LONG], "truncation_side": "left"},
        {"text_1": "word " * 60, "text_2": OTHER},
        {"text_1": TEXT, "text_2": ["a", BYTES]},
        {"text_1": ["a", BYTES], "text_2": ["b", "c"]},
        {"text_1": TEXT, "text_2": []},
        {"text_1": TEXT},
    ],
    "/v1/score": [{"text_1": TEXT, "text_2": OTHER}],
    "/predict": [{"inputs": [TEXT, OTHER]}, {"inputs": [[TEXT, OTHER]], "raw_scores": True}],
    "/embed": [{"inputs": TEXT}],
    "/v1/embeddings": [{"input": TEXT}],
}
TOPICS: Bodies = {
    "/": [{"inputs": TEXT}],
    "/predict": [
        {"inputs": TEXT},
        {"inputs": [TEXT]},
        {"inputs": [[TEXT], [OTHER]]},
        {"inputs": [TEXT, OTHER]},
        {"inputs": [TEXT, OTHER, TEXT]},
        {"inputs": TEXT, "parameters": {"top_k": 1, "function_to_apply": "sigmoid"}},
        {"inputs": TEXT, "parameters": {"top_k": 0}},
        {"inputs": TEXT, "raw_scores": True},
        *_with("inputs", LONG, _LONG_OPTIONS),
        {"inputs": []},
        {"inputs": [["a"]] * 9},
    ],
    "/classify": [
        {"input": TEXT},
        {"input": [TEXT, OTHER], "model": "topics"},
        {"input": LONG},
        {"input": LONG, "truncate_prompt_tokens": -1},
        {"input": TEXT, "use_activation": False},
        {"input": TEXT, "model": "none"},
        {"input": []},
    ],
    "/rerank": [{"query": TEXT, "texts": [OTHER]}],
}
PLAIN: Bodies = {
    "/v1/embeddings": [{"input": TEXT, "input_type": name} for name in ("query", "document", "clustering")],
    "/v2/embed": [{"texts": [TEXT], "embedding_types": ["int8"]}],
    "/vectors": [{"text": TEXT, "config": {"task_type": "query"}}],
    "/page": [{"text": TEXT}],
}
NATIVE: Bodies = {
    "/v1/attnlens/embed": [
        {"inputs": [TEXT]},
        {"inputs": [TEXT], "arrays": "base64"},
        {"inputs": [TEXT], "arrays": "hex"},
        {"inputs": TEXT},
        {"inputs": [7]},
        {"inputs": [TEXT], "none": 1},
        {"inputs": [{"text": TEXT, "token_ids": {}}]},
        {"inputs": [TEXT], "normalize": "yes"},
        {"inputs": [TEXT], "dimensions": 1.5},
        {"inputs": [TEXT], "dimensions": 1 << 40},
        {"inputs": [TEXT], "pooling": "middle"},
        {"inputs": [TEXT], "ranges": [[1], [2, 3]]},
        {"inputs": [TEXT], "ranges": {"shape": [2], "data": "*"}},
        {"inputs": [TEXT], "prompt": "q: "},
        [TEXT],
        b"{",
        b"",
        b"\xff",
    ],
    "/v1/attnlens/attention": [{"inputs": [TEXT]}, {"inputs": [TEXT], "attention": [{"layers": [0]}]}, {}],
}
GETS = (
    "/healthz",
    "/readyz",
    "/metrics",
    "/health",
    "/ping",
    "/info",
    "/meta",
    "/.well-known/live",
    "/.well-known/ready",
    "/v1/models",
    "/v1/models/none",
    "/v1/attnlens/models",
    "/v1/attnlens/models/none",
    "/openapi.json",
    "/docs",
    "/",
    "/favicon.ico",
    "/none",
    "/v1/embedding",
)
OTHERS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("PUT", "/embed", {}),
    ("DELETE", "/v1/embeddings", {}),
    ("GET", "/embed", {}),
    ("POST", "/healthz", {}),
    ("HEAD", "/healthz", {}),
    ("OPTIONS", "/v1/embeddings", {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}),
    ("GET", "/healthz", {"Origin": "https://example.org"}),
    ("GET", "/v1/models", {"Host": "example.org"}),
    ("GET", "/v1/models", {f"X-{number}": "a" for number in range(70)}),
    ("GET", "/v1/models", {"X-Request-Id": "not valid!"}),
    ("POST", "/v1/embeddings", {"Content-Encoding": "br"}),
    ("POST", "/v1/embeddings", {"Content-Encoding": "gzip"}),
    ("POST", "/v1/embeddings", {"Content-Type": "text/plain", "Origin": "https://example.org"}),
)
"""Method, path and headers."""


def _bytes(*texts: str) -> dict[str, Any]:
    encoded = [base64.b64encode(text.encode()).decode() for text in texts]
    return {
        "name": "text",
        "datatype": "BYTES",
        "shape": [len(texts)],
        "contents": {"bytes_contents": encoded},
    }


def _ints(name: str, *rows: list[int], **fields: Any) -> dict[str, Any]:
    flat = [number for row in rows for number in row]
    shape = [len(rows), len(rows[0])]
    return {"name": name, "datatype": "INT64", "shape": shape, "contents": {"int64_contents": flat}} | fields


def _infer(*inputs: dict[str, Any], outputs: tuple[str, ...] = (), **parameters: Any) -> dict[str, Any]:
    return {
        "id": "1",
        "inputs": list(inputs),
        "outputs": [{"name": name} for name in outputs],
        "parameters": parameters,
    }


_IDS, _MASK = _ints("input_ids", [101, 7, 102], [101, 102, 0]), _ints("attention_mask", [1, 1, 1], [1, 1, 0])
INFERENCE: dict[str, list[dict[str, Any]]] = {
    "ServerLive": [{}],
    "ServerReady": [{}],
    "ModelReady": [{}, {"name": "none"}, {"version": "2"}],
    "ServerMetadata": [{}],
    "ModelMetadata": [{}, {"name": "none"}, {"version": "2"}],
    "ModelConfig": [{}, {"name": "none"}],
    "RepositoryIndex": [{}, {"ready": True}],
    "ModelInfer": [
        _infer(_bytes(TEXT, OTHER)),
        _infer(
            _bytes(TEXT),
            outputs=("sentence_embedding", "last_hidden_state", "attention_mask", "contributions"),
        ),
        _infer(
            _bytes(TEXT),
            outputs=("embedding",),
            dimensions={"int64_param": 8},
            normalize={"bool_param": False},
        ),
        _infer(_bytes(TEXT), outputs=("none",)),
        _infer(_bytes(TEXT), outputs=("embedding", "embedding")),
        _infer(_bytes(TEXT), pooling={"string_param": "middle"}),
        _infer(_bytes(TEXT), pooling={"int64_param": 1}),
        _infer(_bytes(TEXT), prompt_name={"string_param": "none"}),
        _infer(_bytes(TEXT), dimensions={"int64_param": 100000}),
        _infer(_bytes(TEXT), none={"int64_param": 1}),
        _infer(_bytes(TEXT), triton_final_response={"bool_param": True}),
        _infer(_bytes(OTHER, LONG)),
        _infer(_bytes(LONG), truncate={"bool_param": True}),
        _infer(_bytes(BYTES)),
        _infer(_bytes(*"aaaaaaaaa")),
        _infer(_bytes()),
        _infer(_bytes(TEXT) | {"shape": [2]}),
        _infer(_bytes(TEXT) | {"datatype": "FP32"}),
        _infer(_bytes(TEXT) | {"parameters": {"shared_memory_region": {"string_param": "a"}}}),
        _infer(_bytes(TEXT), _bytes(OTHER)),
        _infer(_bytes(TEXT), _bytes(OTHER) | {"name": "text_pair"}),
        _infer(),
        _infer(_IDS, _MASK),
        _infer(_IDS, _MASK, outputs=("attention_mask",)),
        _infer(_IDS, _MASK, outputs=("sentence_embedding", "contributions")),
        _infer(_IDS),
        _infer(_IDS, _ints("attention_mask", [1, 1, 1])),
        _infer(_IDS, _ints("attention_mask", [1, 0, 1], [1, 1, 0])),
        _infer(_IDS, _ints("attention_mask", [0, 0, 0], [1, 1, 0])),
        _infer(_ints("input_ids", [101, 7, -1], [101, 102, 0]), _MASK),
        _infer(_IDS, _MASK, _ints("token_type_ids", [0, 0, 9], [0, 0, 0])),
        _infer(_IDS, _MASK) | {"model_name": "none"},
        _infer(_IDS, _MASK) | {"model_version": "2"},
        _infer(_IDS | {"contents": {}}, _MASK | {"contents": {}}) | {"raw_input_contents": ["", ""]},
        _infer(_IDS, _MASK) | {"raw_input_contents": ["AAAA"]},
    ],
}
