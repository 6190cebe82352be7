"""Requests of `attnlens.v1.EncoderService`, which are sent over gRPC and as JSON over HTTP.

A request is the usual request of its method with some fields replaced. `None` removes a field.
"""

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np

Fields = dict[str, Any]

TEXT, OTHER = "A man plays the guitar.", "It rained."
LONG = "word " * 300
"""More tokens than a model takes."""
BYTES = "x" * 4001
"""More bytes than `--max-text-bytes`."""
IDS: Fields = {"token_ids": {"input_ids": [101, 7, 8, 102]}}
PAIR: Fields = {"text_pair": {"first": TEXT, "second": OTHER}}
NO_MODEL: list[Fields] = [
    {"model": "none"},
    {"model_version": "abc"},
    {"model": "none", "model_version": "a"},
]


def text(value: str = TEXT) -> Fields:
    """Return an input."""
    return {"text": value}


def tensor(values: Any, data_type: str = "float32") -> Fields:
    """Return a tensor."""
    array = np.asarray(values, data_type)
    data = base64.b64encode(array.tobytes()).decode()
    return {"shape": list(array.shape), "data_type": f"DATA_TYPE_{data_type.upper()}", "data": data}


def token_ids(*ids: int, types: tuple[int, ...] = ()) -> Fields:
    """Return an input of token ids."""
    return {"token_ids": {"input_ids": list(ids), "token_type_ids": list(types)}}


INPUTS: list[Fields] = [
    {},
    {"inputs": [text(TEXT), text(OTHER), text("")]},
    {"inputs": [text("Füße 🎸 naïve")]},
    {"inputs": None},
    {"inputs": [text("a")] * 8},
    {"inputs": [text("a")] * 9},
    {"inputs": [text(), {}]},
    {"inputs": [text(OTHER), text(LONG)]},
    {"inputs": [text(LONG)], "truncate": True},
    {"inputs": [text(LONG)], "truncate": False},
    {"inputs": [text(BYTES)]},
    {"inputs": [text(BYTES[1:])], "truncate": True},
    {"inputs": [text(BYTES[1:])] * 5},
    {"inputs": [IDS]},
    {"inputs": [IDS], "prompt": {"text": "q: "}},
    {"inputs": [IDS], "prompt": {"text": ""}},
    {"inputs": [token_ids()]},
    {"inputs": [token_ids(101, -1, 102)]},
    {"inputs": [token_ids(101, 40_000, 102)]},
    {"inputs": [token_ids(101, 7, types=(0,))]},
    {"inputs": [token_ids(101, 7, types=(0, 3))]},
    {"inputs": [token_ids(101, 7, 102, types=(0, 1, 1))]},
    {"inputs": [token_ids(*[7] * 600)]},
    {"inputs": [token_ids(*[7] * 600)], "truncate": True},
    {"inputs": [PAIR, text()]},
    {"inputs": [{"text_pair": {}}]},
    {"prompt": {"text": "query: "}},
    {"prompt": {"text": "word " * 300}},
    {"prompt": {"text": "word " * 300}, "truncate": True},
    {"prompt": {"text": BYTES}},
    {"prompt": {"name": "query"}},
    {"prompt": {}},
    {"inputs": [text(), {}, token_ids()], "prompt": {"name": "none"}},
    *NO_MODEL,
]
POOLED: list[Fields] = [
    {"pooling": "POOLING_CLS"},
    {"pooling": "POOLING_MAX"},
    {"pooling": 9},
    {"dimensions": 8},
    {"dimensions": 100_000},
    {"dimensions": -1},
]
EMBED: list[Fields] = [
    *INPUTS,
    *POOLED,
    {"normalize": False},
    {"normalize": True, "dimensions": 8},
    {"data_type": "DATA_TYPE_FLOAT16"},
    {"data_type": "DATA_TYPE_INT8"},
    {"data_type": 99},
    *(
        {"embedding_type": f"EMBEDDING_TYPE_{name}"}
        for name in ("FLOAT", "INT8", "UINT8", "BINARY", "UBINARY")
    ),
    {"embedding_type": 9},
    {"embedding_type": "EMBEDDING_TYPE_INT8", "dimensions": 8},
    {"embedding_type": "EMBEDDING_TYPE_INT8", "normalize": False},
    {"embedding_type": "EMBEDDING_TYPE_INT8", "dimensions": 2, "ranges": tensor([[-1, -1], [1, 1]])},
    {"embedding_type": "EMBEDDING_TYPE_INT8", "dimensions": 2, "ranges": tensor([[1, -1], [-1, 1]])},
    {"embedding_type": "EMBEDDING_TYPE_INT8", "ranges": tensor([[-1, -1], [1, 1]])},
    {"embedding_type": "EMBEDDING_TYPE_BINARY", "data_type": "DATA_TYPE_FLOAT16"},
    {"ranges": tensor([[-1, -1], [1, 1]])},
    {"embedding_type": "EMBEDDING_TYPE_INT8", "ranges": {"shape": [2, 2], "data_type": 1, "data": "AAAA"}},
    {"embedding_type": "EMBEDDING_TYPE_INT8", "ranges": tensor([[1, 2]], "float64")},
    {"inputs": [text(), {}], "dimensions": -1, "pooling": 9, "data_type": 9, "prompt": {}},
]


def reduced(**reduction: Any) -> Fields:
    """Return a query with a reduction."""
    return {"attention": [{"reduction": reduction}]}


WORDS, DROP = "ATTENTION_LEVEL_WORDS", "SPECIAL_TOKENS_DROP"
ROLLOUT = "LAYER_REDUCTION_ROLLOUT"
QUERIES: list[Fields] = [
    {"attention": [{}]},
    {"attention": [{}], "last_hidden_state": True, "data_type": "DATA_TYPE_FLOAT16"},
    {"attention": [{"layers": [0], "heads": [0, -1]}, {"view": "ATTENTION_VIEW_HEAD_MEAN"}]},
    {"attention": [{"view": "ATTENTION_VIEW_DENSE", "layers": [-1]}]},
    {"attention": [{"layers": [99]}]},
    {"attention": [{"layers": [0, 0], "heads": [50]}]},
    {"attention": [{"layers": list(range(20))}]},
    {"attention": [{"role": "OUTPUT_ROLE_HEAD_GATES"}]},
    {"attention": [{"role": 99}]},
    {"attention": [{"view": 9}]},
    {"attention": [{}] * 16},
    {"attention": [{}] * 17},
    {"inputs": [IDS], "attention": [{"heads": [0]}]},
    reduced(),
    reduced(level=WORDS, special_tokens=DROP),
    reduced(level=9, special_tokens=9, layers=9),
    reduced(layers="LAYER_REDUCTION_MEAN"),
    reduced(layers=ROLLOUT),
    reduced(layers=ROLLOUT, rollout_residual=1.5),
    reduced(rollout_residual=0.5),
    {"attention": [{"view": "ATTENTION_VIEW_FULL", "reduction": {"layers": ROLLOUT}}]},
    reduced(mean_over_rows=True),
    reduced(mean_over_rows=True, rows=[0]),
    reduced(rows=[0, -1]),
    reduced(rows=[0, 0]),
    reduced(rows=[99]),
    reduced(rows=list(range(600))),
    reduced(top_k={"k": 2}),
    reduced(top_k={"k": 0}),
    reduced(threshold={"threshold": 0.9999}),
    reduced(threshold={"threshold": 0}),
    reduced(statistics={"received": True, "entropy": True}),
    reduced(statistics={}),
    reduced(statistics={"received": True}, rows=[0]),
    reduced(sqrt_uint8={}),
    {"inputs": [text(), IDS], **reduced(level=WORDS, special_tokens=DROP)},
    {"inputs": [IDS], **reduced(statistics={"received": True})},
    {"inputs": [IDS], **reduced(statistics={"received": True, "all_rows": True})},
    {"inputs": [text(), {}], "data_type": 9, "attention": [{"view": 9, "layers": [99]}, {"role": 99}]},
]
ENCODE: list[Fields] = [*INPUTS, *QUERIES, {"last_hidden_state": True}, {"data_type": "DATA_TYPE_FLOAT16"}]
STREAM: list[Fields] = [
    {},
    {"inputs": [text(), text(OTHER)], "attention": [{}], "last_hidden_state": True},
    {"attention": [{"layers": [0]}, {"reduction": {"layers": ROLLOUT}}]},
    {"inputs": None},
    {"inputs": [text("a")] * 9},
    {"inputs": [text(), text(LONG)], "attention": [{}]},
    {"inputs": [text(), text(LONG)], "attention": [{}], "truncate": True},
    {"inputs": [{}, text(BYTES)], "prompt": {}},
    {"attention": [{"layers": [99]}]},
    reduced(rows=[99]),
    {"inputs": [IDS], "attention": [{}]},
    {"data_type": "DATA_TYPE_FLOAT16", "attention": [{}]},
    *NO_MODEL,
]
TOKENIZE: list[Fields] = [each for each in INPUTS if "truncate" not in each]


def methods(*names: str, **fields: Any) -> Fields:
    """Return fields with methods of explanations."""
    return {"methods": [f"EXPLAIN_METHOD_{name}" for name in names], **fields}


METHODS: list[Fields] = [
    methods("CONTRIBUTIONS"),
    methods("OUTPUT_SHARE"),
    methods("LEAVE_ONE_OUT"),
    methods("ROLLOUT"),
    methods("RECEIVED_ATTENTION"),
    methods("CONTRIBUTION_NORM"),
    methods("CONTRIBUTIONS", "LEAVE_ONE_OUT", "ROLLOUT", level="EXPLAIN_LEVEL_WORDS"),
    methods("ROLLOUT", "ROLLOUT"),
    methods("ROLLOUT", head_contributions=True),
    {"methods": [99, 0]},
    {"methods": ["EXPLAIN_METHOD_ROLLOUT"] * 13},
    {"level": "EXPLAIN_LEVEL_WORDS"},
    {"level": 9},
    {"head_contributions": True},
    methods("OUTPUT_SHARE", pooling="POOLING_MAX"),
    methods(
        "LEAVE_ONE_OUT", inputs=[text("word " * 100)] * 8, pairs=[{"a": text("word " * 200), "b": text()}] * 8
    ),
]
EXPLAIN: list[Fields] = [
    *INPUTS,
    *POOLED,
    *METHODS,
    {"own_embedding": {}},
    {"to": text(OTHER)},
    {"to": text(OTHER), "target_prompt": {"text": "q: "}},
    {"to": {}},
    {"to": text(LONG)},
    {"to": text(LONG), "truncate": True},
    {"to": IDS},
    {"target_prompt": {"text": "q: "}},
    {"contrast": {"to": text(OTHER), "rather_than": text("The sea.")}},
    {"contrast": {"to": text(OTHER), "rather_than": text(OTHER)}},
    {"contrast": {}},
    {"contrast": {"to": text(OTHER), "rather_than": text(LONG)}},
    {"direction": tensor([1, 0]), "dimensions": 2},
    {"direction": tensor([1, 0])},
    {"direction": tensor([0, 0]), "dimensions": 2},
    {"direction": tensor([1, np.nan]), "dimensions": 2},
    {"direction": tensor([1, 0], "int32"), "dimensions": 2},
    {"inputs": [IDS], "level": "EXPLAIN_LEVEL_WORDS"},
    {"label": {"label": {"index": 0}}},
    {"label": {"label": {"name": "sea"}, "rather_than": {"index": 0}}},
    {"label": {"label": {"index": 0}, "rather_than": {"index": 0}}},
    {"label": {"label": {"index": 9}}},
    {"label": {"label": {"name": "none"}, "rather_than": {}}},
    {"label": {}},
]


def pair(first: Fields | None = None, second: Fields | None = None) -> Fields:
    """Return two texts to compare."""
    return {"a": text() if first is None else first, "b": text(OTHER) if second is None else second}


COMPARE: list[Fields] = [
    {},
    {"pairs": [pair(), pair(text("The sea."))]},
    {"pairs": None},
    {"pairs": [pair()] * 9},
    {"pairs": [pair({}), pair(second={})]},
    {"pairs": [pair(), pair(second=text(LONG))]},
    {"pairs": [pair(text(LONG))], "truncate": True},
    {"pairs": [pair(text(BYTES))]},
    {"pairs": [pair(IDS, IDS)]},
    {"pairs": [pair(token_ids(), token_ids(101, -1))]},
    {"pairs": [pair(PAIR)]},
    {"prompt_a": {"text": "q: "}, "prompt_b": {"text": ""}},
    {"prompt_a": {}, "prompt_b": {"name": "none"}},
    *POOLED,
    *METHODS,
    *({"matrix": f"PAIR_MATRIX_{name}"} for name in ("OUTPUT", "INTERACTION", "INPUT")),
    {"matrix": 9},
    {"matrix": "PAIR_MATRIX_OUTPUT", "pooling": "POOLING_MAX"},
    {"matrix": "PAIR_MATRIX_INPUT", "pairs": [pair(text("word " * 200), text("word " * 200))] * 8},
    *NO_MODEL,
]
SCORE: list[Fields] = [
    {},
    {"documents": ["The sea.", "", "Füße 🎸"]},
    {"documents": None},
    {"query": None},
    {"query": None, "documents": None},
    {"documents": ["a"] * 9},
    {"documents": [BYTES]},
    {"query": BYTES},
    {"query": "word " * 60},
    {"documents": [LONG, "a"]},
    {"documents": [LONG], "long_documents": "LONG_DOCUMENTS_SPLIT"},
    {"documents": [LONG], "long_documents": "LONG_DOCUMENTS_REJECT"},
    {"long_documents": 9},
    {"max_tokens_per_document": 3},
    {"max_tokens_per_document": -1},
    {"documents": [LONG], "max_tokens_per_document": 3, "long_documents": "LONG_DOCUMENTS_REJECT"},
    {"top_n": 1},
    {"top_n": -1},
    {"activation": "ACTIVATION_IDENTITY"},
    {"activation": "ACTIVATION_SOFTMAX"},
    {"activation": 9},
    {"prompt": {"text": "q: "}},
    {"prompt": {}},
    {"pairs": [{"first": TEXT, "second": OTHER}]},
    {"query": None, "documents": None, "pairs": [{"first": TEXT, "second": OTHER}, {"first": "a"}]},
    {"query": None, "documents": None, "pairs": [{"first": "a", "second": "b"}] * 9},
    {"query": None, "documents": None, "pairs": [{"first": LONG, "second": "b"}]},
    {"explanation": {}},
    {"explanation": {"level": "EXPLAIN_LEVEL_WORDS"}, "top_n": 1},
    {"explanation": {"level": 9}},
    {"explanation": {}, "documents": [LONG, "a"], "long_documents": "LONG_DOCUMENTS_SPLIT"},
    *NO_MODEL,
]
CLASSIFY: list[Fields] = [
    *INPUTS,
    {"activation": "ACTIVATION_IDENTITY"},
    {"activation": "ACTIVATION_SIGMOID"},
    {"activation": 9},
]
USUAL: dict[str, Fields] = {
    "Embed": {"inputs": [text()]},
    "Encode": {"inputs": [text()]},
    "EncodeStream": {"inputs": [text()]},
    "Tokenize": {"inputs": [text()]},
    "Explain": {"inputs": [text()]},
    "Compare": {"pairs": [pair()]},
    "Score": {"query": TEXT, "documents": [OTHER, "The sea."]},
    "Classify": {"inputs": [text()]},
    "ListModels": {},
    "GetModel": {},
}
EMBEDDER: dict[str, list[Fields]] = {
    "Embed": EMBED,
    "Encode": ENCODE,
    "EncodeStream": STREAM,
    "Tokenize": TOKENIZE,
    "Explain": EXPLAIN,
    "Compare": COMPARE,
    "Score": SCORE[:3],
    "Classify": CLASSIFY[:3],
    "ListModels": [{}],
    "GetModel": [{}, *NO_MODEL],
}
RERANKER: dict[str, list[Fields]] = {
    "Embed": EMBED[:3],
    "Encode": [{}, {"attention": [{}]}],
    "Explain": [*METHODS, *EXPLAIN[-6:], {"inputs": [PAIR]}, {"to": text(OTHER), "dimensions": 2}],
    "Compare": COMPARE[:2],
    "Score": SCORE,
    "Classify": CLASSIFY[:3],
    "Tokenize": [{"inputs": [PAIR]}],
    "GetModel": [{}],
}
TOPICS: dict[str, list[Fields]] = {
    "Embed": EMBED[:2],
    "Explain": EXPLAIN[-6:],
    "Score": SCORE[:2],
    "Classify": CLASSIFY,
    "GetModel": [{}],
}
PLAIN: dict[str, list[Fields]] = {
    "Embed": [*POOLED, *EMBED[-16:], {"prompt": {"name": "query"}}, {"prompt": {"name": "none"}}],
    "Explain": METHODS,
    "Compare": COMPARE[-18:],
    "GetModel": [{}],
}
"""Requests to a model without a contributions graph, with a dense layer and prompts."""


def requests(table: dict[str, list[Fields]]) -> Iterator[tuple[str, str, Fields]]:
    """Yield method, name and fields of each request."""
    for method, changes in table.items():
        for changed in changes:
            usual = USUAL[method]
            # Changes of Explain and Compare share a table.
            known = {"pairs"} if method == "Explain" else {"inputs"} if method == "Compare" else set[str]()
            fields = {name: value for name, value in {**usual, **changed}.items() if name not in known}
            fields = {name: value for name, value in fields.items() if value is not None}
            yield method, shorten(changed), fields


def shorten(value: Any) -> str:
    """Return a value as text in which long parts are replaced by their length."""
    if isinstance(value, str):
        return value if len(value) <= 40 else f"{value[:8]}…{len(value)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {shorten(each)}" for name, each in value.items()) + "}"
    if not isinstance(value, list):
        return str(value)
    if len(value) > 1 and all(each == value[0] for each in value):
        return f"[{len(value)} of {shorten(value[0])}]"
    shown = ", ".join(map(shorten, value)) if len(value) <= 8 else f"{value[0]}, … {len(value)}"
    return f"[{shown}]"
