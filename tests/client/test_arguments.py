"""What the methods of both clients take, and what they refuse before anything is sent."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from attnlens_client import AsyncClient, Client
from attnlens_client.core import requests

Call = Callable[..., Any]


class DataFrame:
    """What counts of those of pandas and polars: it has columns, and iterating gives them or their names."""

    columns = ("id", "text")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


class NAType:
    """What counts of pandas.NA: it is equal to nothing, and can't be asked whether it is true."""

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
        ("It rained.", {}, "give a list of texts"),
        ([b"It rained."], {}, r"texts\[0\] is bytes"),
        (["a", 5], {}, r"texts\[1\] is int"),
        ({"a": "It rained."}, {}, r"texts is a dict: give its values, for instance list\(texts.values\(\)\)"),
        ({"a", "b"}, {}, r"texts is a set, which has no order: give a list, for instance sorted\(texts\)"),
        (frozenset("a"), {}, "texts is a frozenset"),
        (DataFrame(), {}, r"texts is a DataFrame: give one of its columns, for instance df\['text'\]"),
        (["a", None], {}, r"texts\[1\] is a missing value \(None\): leave it out, or give ''"),
        (["a", float("nan")], {}, r"texts\[1\] is a missing value \(nan\)"),
        (["a", np.float32("nan")], {}, r"texts\[1\] is a missing value \(.*nan"),
        (["a", NAType()], {}, r"texts\[1\] is a missing value \(<NA>\)"),
        (["a", 0.5], {}, r"texts\[1\] is float"),
        (["a", {101: 1}], {}, r"texts\[1\] is dict"),
        (["a", {101, 102}], {}, r"texts\[1\] is set"),
        ([["it", "rained"]], {}, r"texts\[0\] has an entry that is no token id"),
        (["\ud800"], {}, r"texts\[0\] can't be sent"),
        ([[1 << 40]], {}, r"texts\[0\] can't be sent"),
        (["a"], {"pooling": "median"}, "choose one of mean, cls, max, last_token, weighted_mean"),
        (["a"], {"prompt": "a", "prompt_name": "b"}, "prompt_name and prompt are both given"),
        (["a"], {"prompt": "\udcff"}, "prompt can't be sent"),
        (["a"], {"prompt": b"query: "}, "prompt is bytes: give a str"),
        (["a"], {"prompt_name": 5}, "prompt_name is int: give a str"),
        (["a"], {"dimensions": 0}, "dimensions is 0"),
        (["a"], {"dimensions": 1 << 40}, "dimensions is 1099511627776"),
        (["a"], {"dtype": "int8"}, "choose one of float32, float16"),
        (["a"], {"dtype": "bogus"}, "dtype is 'bogus': choose one of float32, float16"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_sent(
    texts: Any, options: dict[str, Any], message: str
) -> None:
    with (
        Client("127.0.0.1:1", max_attempts=1) as client,
        pytest.raises((TypeError, ValueError), match=message),
    ):
        client.embed(texts, **options)


@pytest.mark.parametrize(
    "options", [{"layers": []}, {"heads": []}, {"hidden_states": False, "attentions": False}]
)
def test_asking_encode_for_what_can_not_be_is_a_mistake(options: dict[str, Any]) -> None:
    with Client("127.0.0.1:1", max_attempts=1) as client:
        for method in (client.encode, client.stream, client.stream_parts):
            with pytest.raises(ValueError, match=r"leave it out for all|use tokenize|set attentions=True"):
                method(["a"], **options)


@pytest.mark.parametrize("texts", [{"a": "b"}, {"a"}, None, ["a", None]])
def test_every_method_refuses_what_holds_no_texts(texts: Any) -> None:
    with Client("127.0.0.1:1", max_attempts=1) as client:
        for method in (client.embed, client.encode, client.stream, client.stream_parts, client.tokenize):
            with pytest.raises(TypeError, match="texts"):
                method(texts)


@pytest.mark.parametrize("kind", [list, tuple, iter, dict.fromkeys, np.array])
def test_what_has_its_texts_in_order_is_taken(kind: Callable[[list[str]], Any]) -> None:
    given = kind(["b", "a"])
    assert [text.text for text in requests.inputs(given.keys() if isinstance(given, dict) else given)] == [
        "b",
        "a",
    ]


def test_a_text_that_can_not_be_tokenized_is_named() -> None:
    with Client("127.0.0.1:1", max_attempts=1) as client:
        with pytest.raises(ValueError, match=r"^texts\[1\] can't be sent"):
            client.tokenize(["a", "\ud800"])
        with pytest.raises(TypeError, match=r"^texts\[1\] is int: give a str"):
            client.tokenize(["a", 5])  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["layers", "heads"])
@pytest.mark.parametrize("chosen", [3, "12", [1.9], ["1"], np.array([0.5]), np.array(1), [1 << 40]])
def test_layers_and_heads_are_lists_of_whole_numbers(name: str, chosen: Any) -> None:
    with Client("127.0.0.1:1", max_attempts=1) as client, pytest.raises((TypeError, ValueError), match=name):
        client.encode(["a"], **{name: chosen})


@pytest.mark.parametrize("chosen", [np.array([0]), (0,), range(1), [np.int64(0)]])
def test_layer_and_head_zero_alone_are_no_request_for_all(client: Client, chosen: Any) -> None:
    [result] = client.encode(["a"], layers=chosen, heads=chosen)
    assert (result.layers, result.heads) == ((0,), (0,))


@pytest.mark.parametrize(
    "method", ["embed", "embed_with_usage", "encode", "stream", "stream_parts", "tokenize"]
)
def test_the_clients_have_the_same_explicit_arguments(method: str) -> None:
    of_sync, of_async = (
        inspect.signature(getattr(kind, method)).parameters for kind in (Client, AsyncClient)
    )
    assert of_sync == of_async
    [_, texts, *options] = of_sync.values()
    assert texts.name == "texts"
    assert {option.kind for option in options} == {inspect.Parameter.KEYWORD_ONLY}
    assert "model" in {option.name for option in options}
    assert all(option.annotation is not inspect.Parameter.empty for option in options)


def test_a_misspelt_argument_is_named(connect: Call) -> None:
    with connect("127.0.0.1:1") as call, pytest.raises(TypeError, match=r"embed\(\) .* 'poling'"):
        call("embed", ["a"], poling="cls")
