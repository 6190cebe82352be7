"""Arguments of both clients, and those rejected before sending."""

import inspect
import pydoc
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import pytest

from attnlens.classifiers import ScoreActivation
from attnlens.reductions import AttentionReduction, Statistics, TopK
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1 import explanation_pb2
from attnlens.v1.manifest_pb2 import Activation, OutputRole, Pooling
from attnlens_client import AsyncClient, AttentionQuery, Client, Text, TokenIds
from attnlens_client.arguments import (
    ActivationName,
    ExplainLevelName,
    ExplainMethodName,
    LongDocumentsName,
    PairMatrixName,
    PoolingName,
    RoleName,
    ViewName,
)
from attnlens_client.core import requests

Call = Callable[..., Any]


class DataFrame:
    """Fake data frame of pandas or polars: iterating yields columns or their names."""

    columns = ("id", "text")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


class NAType:
    """Fake pandas.NA: not equal to anything, and without a truth value."""

    def __eq__(self, other: object) -> Any:
        return self

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("boolean value of NA is ambiguous")

    def __repr__(self) -> str:
        return "<NA>"


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ("It rained.", {}, "use a list of texts"),
        ([b"It rained."], {}, r"texts\[0\] is bytes"),
        (["a", 5], {}, r"texts\[1\] is int"),
        ({"a": "It rained."}, {}, r"texts is a dict: use its values, such as list\(texts.values\(\)\)"),
        ({"a", "b"}, {}, r"texts is a set, which has no order: use a list, such as sorted\(texts\)"),
        (frozenset("a"), {}, "texts is a frozenset"),
        (DataFrame(), {}, r"texts is a DataFrame: use one of its columns, such as df\['text'\]"),
        (["a", None], {}, r"texts\[1\] is a missing value \(None\): remove it, or replace it by ''"),
        (["a", float("nan")], {}, r"texts\[1\] is a missing value \(nan\)"),
        (["a", np.float32("nan")], {}, r"texts\[1\] is a missing value \(.*nan"),
        (["a", NAType()], {}, r"texts\[1\] is a missing value \(<NA>\)"),
        (["a", 0.5], {}, r"texts\[1\] is float"),
        (["a", {101: 1}], {}, r"texts\[1\] is dict"),
        (["a", {101, 102}], {}, r"texts\[1\] is set"),
        ([["it", "rained"]], {}, r"texts\[0\] has .* not a token id"),
        (["\ud800"], {}, r"texts\[0\] cannot be encoded"),
        ([[1 << 40]], {}, r"texts\[0\] cannot be encoded"),
        (["a"], {"pooling": "median"}, "use one of mean, cls, max, last_token, weighted_mean"),
        (["a"], {"prompt": "a", "prompt_name": "b"}, "prompt_name and prompt are both set"),
        (["a"], {"prompt": "\udcff"}, "prompt cannot be encoded"),
        (["a"], {"prompt": b"query: "}, "prompt is bytes: use a str"),
        (["a"], {"prompt_name": 5}, "prompt_name is int: use a str"),
        (["a"], {"dimensions": 0}, "dimensions is 0"),
        (["a"], {"dimensions": 1 << 40}, "dimensions is 1099511627776"),
        (["a"], {"dimensions": "3"}, "dimensions is '3': use an integer"),
        (["a"], {"dimensions": 2.5}, "dimensions is 2.5: use an integer"),
        (
            ["a"],
            {"normalize": "yes"},
            "normalize is 'yes': use True, False, or None for the default of the model",
        ),
        (["a"], {"normalize": 1}, "normalize is 1: use True, False"),
        (["a"], {"dtype": "int8"}, "use one of float32, float16"),
        (["a"], {"dtype": "bogus"}, "dtype is 'bogus': use one of float32, float16"),
    ],
)
def test_invalid_argument_is_reported_before_anything_is_sent(
    texts: Any, options: dict[str, Any], message: str
) -> None:
    with (
        Client("127.0.0.1:1", max_attempts=1) as client,
        pytest.raises((TypeError, ValueError), match=message),
    ):
        client.embed(texts, **options)


def test_every_method_rejects_fractional_numbers() -> None:
    with Client("127.0.0.1:1", max_attempts=1) as client:
        wrong: Any
        for name in ("batch_size", "in_flight"):
            for wrong in ("3", 2.5):
                with pytest.raises(TypeError, match=f"^{name} is {wrong!r}: use an integer"):
                    client.embed_iter(["a"], **{name: wrong})
        with pytest.raises(TypeError, match=r"^dimensions is '3': use an integer"):
            client.explain(["a"], dimensions="3")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"^dimensions is 2\.5: use an integer"):
            client.compare("a", "b", dimensions=2.5)  # type: ignore[arg-type]


def test_encode_rejects_a_request_without_outputs() -> None:
    with Client("127.0.0.1:1", max_attempts=1) as client:
        for method in (client.encode, client.encode_stream, client.encode_stream_parts):
            with pytest.raises(ValueError, match="use tokenize for tokens alone"):
                method(["a"], last_hidden_state=False)
            with pytest.raises(TypeError, match="use an AttentionQuery, a list of them, or None"):
                method(["a"], attention=[0])  # type: ignore[list-item]
            with pytest.raises(TypeError, match="use an AttentionQuery, a list of them, or None"):
                method(["a"], attention="full")  # type: ignore[arg-type]


@pytest.mark.parametrize("texts", [{"a": "b"}, {"a"}, None, ["a", None]])
def test_every_method_rejects_a_value_that_is_not_a_list_of_texts(texts: Any) -> None:
    with Client("127.0.0.1:1", max_attempts=1) as client:
        for method in (
            client.embed,
            client.encode,
            client.encode_stream,
            client.encode_stream_parts,
            client.tokenize,
        ):
            with pytest.raises(TypeError, match="texts"):
                method(texts)


@pytest.mark.parametrize("kind", [list, tuple, iter, dict.fromkeys, np.array])
def test_ordered_collections_of_texts_are_accepted(kind: Callable[[list[str]], Any]) -> None:
    given = kind(["b", "a"])
    assert [text.text for text in requests.inputs(given.keys() if isinstance(given, dict) else given)] == [
        "b",
        "a",
    ]


def test_text_is_a_string_a_pair_or_token_ids() -> None:
    texts: list[Text] = ["a", ("b", "c"), [1, 2], (3, 4), TokenIds([5, 6], [0, 1]), TokenIds(range(2))]
    assert requests.inputs(texts) == [
        pb.Input(text="a"),
        pb.Input(text_pair=pb.TextPair(first="b", second="c")),
        pb.Input(token_ids=pb.TokenIds(input_ids=[1, 2])),
        pb.Input(token_ids=pb.TokenIds(input_ids=[3, 4])),
        pb.Input(token_ids=pb.TokenIds(input_ids=[5, 6], token_type_ids=[0, 1])),
        pb.Input(token_ids=pb.TokenIds(input_ids=[0, 1])),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (("a",), "'a', which is not a token id: for a pair of texts use a tuple"),
        (("a", "b", "c"), "'a', which is not a token id: for a pair of texts use a tuple"),
        (["a", "b"], "'a', which is not a token id: for a pair of texts use a tuple"),
        (("a", 5), "'a', which is not a token id"),
        ((5, "a"), "'a', which is not a token id"),
        (("a", "\ud800"), "cannot be encoded"),
        (TokenIds([1.5]), "(invalid token id|not a token id)"),  # type: ignore[list-item]
        (TokenIds([1], ["a"]), "(invalid token id|not a token id)"),  # type: ignore[list-item]
    ],
)
def test_any_other_kind_of_text_is_rejected(text: Any, message: str) -> None:
    with Client("127.0.0.1:1", max_attempts=1) as client:
        for method in (client.embed, client.encode, client.encode_stream, client.tokenize):
            with pytest.raises((TypeError, ValueError), match=rf"^texts\[1\] .*{message}"):
                method(["a", text])


def test_single_list_of_token_ids_is_not_a_list_of_texts() -> None:
    with pytest.raises(TypeError, match="texts is one TokenIds"):
        requests.inputs(TokenIds([1]))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["layers", "heads"])
@pytest.mark.parametrize("chosen", [3, "12", [1.9], ["1"], np.array([0.5]), np.array(1), [1 << 40], []])
def test_layers_and_heads_are_lists_of_integers(name: str, chosen: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        AttentionQuery(**{name: chosen})


@pytest.mark.parametrize("chosen", [np.array([0]), (0,), range(1), [np.int64(0)]])
def test_layer_zero_and_head_zero_are_sent_explicitly(chosen: Any) -> None:
    query = AttentionQuery(layers=chosen, heads=chosen)
    assert query == AttentionQuery(layers=(0,), heads=(0,))
    message = requests.query_message(query)
    assert (list(message.layers), list(message.heads)) == ([0], [0])


@pytest.mark.parametrize(("name", "value"), [("view", "mean"), ("role", "last_hidden_state"), ("view", None)])
def test_query_rejects_unknown_names(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}: use one of"):
        AttentionQuery(**{name: value})


def test_names_match_the_protocol() -> None:
    assert set(get_args(ViewName)) == set(requests.values(pb.AttentionView.DESCRIPTOR))
    assert set(get_args(PoolingName)) == set(requests.values(Pooling.DESCRIPTOR))
    of_contributions = {"embedding", "token_contributions", "baseline", "head_contributions"}
    not_of_layers = {"last_hidden_state", "logits"} | of_contributions
    assert set(get_args(RoleName)) == set(requests.values(OutputRole.DESCRIPTOR)) - not_of_layers
    for names, enum in (
        (ExplainMethodName, explanation_pb2.ExplainMethod),
        (ExplainLevelName, explanation_pb2.ExplainLevel),
        (PairMatrixName, explanation_pb2.PairMatrix),
        (LongDocumentsName, pb.LongDocuments),
    ):
        assert set(get_args(names)) == set(requests.values(enum.DESCRIPTOR))
    assert set(get_args(ActivationName)) == {activation.name.lower() for activation in ScoreActivation}
    assert {activation.name.lower(): activation.value for activation in ScoreActivation}.items() <= (
        requests.values(Activation.DESCRIPTOR).items()
    )


@pytest.mark.parametrize(
    "method",
    [
        "embed",
        "embed_with_usage",
        "embed_iter",
        "encode",
        "encode_stream",
        "encode_stream_parts",
        "tokenize",
        "explain",
    ],
)
def test_both_clients_have_the_same_explicit_arguments(method: str) -> None:
    of_sync, of_async = (
        inspect.signature(getattr(kind, method)).parameters for kind in (Client, AsyncClient)
    )
    assert of_sync == of_async
    [_, texts, *options] = of_sync.values()
    assert texts.name == "texts"
    assert {option.kind for option in options} == {inspect.Parameter.KEYWORD_ONLY}
    assert "model" in {option.name for option in options}
    assert all(option.annotation is not inspect.Parameter.empty for option in options)


def test_misspelled_argument_is_reported(connect: Call) -> None:
    with connect("127.0.0.1:1") as call:
        with pytest.raises(
            TypeError, match=r"Client\.embed\(\) has no argument 'poling': did you mean 'pooling'\?"
        ):
            call("embed", ["a"], poling="cls")
        with pytest.raises(
            TypeError, match=r"Client\.encode_stream\(\) has no argument 'zzz': it has texts, att"
        ):
            call("encode_stream", ["a"], zzz=1)
        with pytest.raises(
            TypeError, match=r"Client\.encode_stream\(\) missing a required argument: 'texts'"
        ):
            call("encode_stream")


@pytest.mark.parametrize(
    ("make", "given", "options", "message"),
    [
        (
            Client,
            ["a:1"],
            {"timeout": 3},
            r"^Client\(\) has no argument 'timeout': did you mean 'timeout_s'\?",
        ),
        (AsyncClient, ["a:1"], {"batchsize": 3}, r"^AsyncClient\(\) .*: did you mean 'batch_size'\?"),
        (Client, ["a:1"], {"zzz": 3}, r"^Client\(\) has no argument 'zzz': it has address, timeout_s, cred"),
        (Client, [], {}, r"^Client\(\) missing a required argument: 'address'"),
        (Client, ["a:1", 3], {}, r"^Client\(\) too many positional arguments"),
        (Client, ["a:1"], {"batch_size": 1.5}, r"^batch_size is 1\.5: use an integer"),
        (Client, ["a:1"], {"timeout_s": "3"}, "^timeout_s is '3': use a number of seconds, or None for no"),
        (Client, [53170], {}, "^address is 53170: use a str, HOST:PORT or unix:PATH"),
        (AsyncClient, [None], {}, "^address is None: use a str, HOST:PORT or unix:PATH"),
        (AttentionQuery, [], {"layer": 3}, r"^AttentionQuery\(\) .* 'layer': did you mean 'layers'\?"),
        (
            AttentionReduction,
            [],
            {"row": [1]},
            r"^AttentionReduction\(\) has no argument 'row': did you mean 'rows'\?",
        ),
        (TopK, [], {}, r"^TopK\(\) missing a required argument: 'k'"),
        (Statistics, [], {"receive": True}, "did you mean 'received'"),
        (TokenIds, [[1]], {"types": [0]}, r"^TokenIds\(\) has no argument 'types'"),
    ],
)
def test_constructor_reports_an_unknown_argument(
    make: Call, given: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        make(*given, **options)


def test_constructors_keep_their_signatures() -> None:
    assert "timeout_s" in inspect.signature(Client).parameters
    assert list(inspect.signature(TokenIds).parameters) == ["input_ids", "token_type_ids"]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_help_lists_the_arguments(kind: type) -> None:
    shown = pydoc.plain(pydoc.render_doc(kind.embed))  # type: ignore[attr-defined]
    for name in ("texts", "pooling", "dimensions", "progress"):
        assert f"{name}:" in shown
    assert "**" not in shown.splitlines()[2]
