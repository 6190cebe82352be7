"""The repr of results and clients is short, with shapes instead of values."""

from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

import scripted
from attnlens.reductions import (
    AttentionReduction,
    RowStatistics,
    SparseWeights,
    Statistics,
    TopK,
    TopKWeights,
)
from attnlens_client import (
    AsyncClient,
    Attention,
    AttentionPart,
    AttentionQuery,
    Client,
    Comparison,
    Explanation,
    Token,
    TokenizedText,
    TokenScores,
    Usage,
)
from attnlens_client.core import models
from scripted import ScriptedServer

INDICES, VALUES = np.zeros((6, 12, 9, 3), np.int32), np.zeros((6, 12, 9, 3), np.float32)
TOP_TEXT = (
    "TopKWeights(indices int32 (6, 12, 9, 3), values float32 (6, 12, 9, 3), "
    "remaining_mass float32 (6, 12, 9))"
)


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (TopKWeights(INDICES, VALUES, VALUES[..., 0]), TOP_TEXT),
        (
            SparseWeights(INDICES[0, 0, :, 0], INDICES[0, 0, 0], VALUES[0, 0, 0], VALUES[0, 0, :, 0]),
            "SparseWeights(values float32 (3,), kept_mass float32 (9,))",
        ),
        (RowStatistics(received=VALUES[0]), "RowStatistics(received float32 (12, 9, 3))"),
        (Usage(3, 3, truncated=False), "Usage(num_tokens=3, num_tokens_total=3, truncated=False)"),
    ],
)
def test_arrays_are_shown_as_shapes(result: object, shown: str) -> None:
    assert repr(result) == shown


@pytest.mark.parametrize(
    ("form", "reduced", "shown"),
    [
        (
            TopK(3),
            TopKWeights(INDICES, VALUES, VALUES[..., 0]),
            TOP_TEXT,
        ),
        (
            Statistics(received=True),
            RowStatistics(received=VALUES[..., 0]),
            "RowStatistics(received float32 (6, 12, 9))",
        ),
        (None, None, "float32 (0,)"),
    ],
)
def test_reduced_attention_shows_its_reduced_form(form: Any, reduced: Any, shown: str) -> None:
    query, nothing = AttentionQuery(reduction=AttentionReduction(form=form)), np.zeros(0, np.float32)
    attention = Attention(query, (0, 1), (0,), "layout", "one", nothing, reduced=reduced)
    assert repr(attention) == f"Attention(attention_weights, full, layers=[0, 1], {shown})"
    part = AttentionPart(0, 0, 1, (0,), "layout", "one", nothing, reduced=reduced)
    assert repr(part) == f"AttentionPart(input_index=0, query_index=0, layer=1, {shown})"


def test_long_text_shows_its_first_tokens() -> None:
    tokens = tuple(Token(number, f"t{number}", "text", 0, 1, 0, 1, number) for number in range(300))
    text = TokenizedText(tokens, exceeds_max_tokens=True, model="m", model_version="0123456789abcdef")
    assert repr(text) == (
        "TokenizedText(300 tokens: t0 t1 t2 t3 t4 t5 t6 t7 t8 t9 t10 t11 ..., exceeds max_tokens, "
        "model='m', version='0123456789ab')"
    )
    hostile = TokenizedText(
        (Token(1, "<script>", "text", 0, 1, 0, 1, 0),),
        exceeds_max_tokens=False,
        model="<b>",
        model_version="v",
    )
    assert "<script>" not in hostile._repr_html_()
    assert "<b>" not in hostile._repr_html_()


async def test_client_shows_its_address_and_model_without_secrets(server: ScriptedServer) -> None:
    with Client(server.address, api_key="secret", metadata=(("x", "secret"),)) as client:
        assert repr(client) == f"Client({server.address!r})"
        client.get_model()
        client.get_model("scripted")
        assert repr(client) == f"Client({server.address!r}, model='scripted')"
    async with AsyncClient("there:1", credentials=grpc.ssl_channel_credentials()) as encrypted:
        assert repr(encrypted) == "AsyncClient('there:1', TLS)"


def test_control_characters_from_a_server_are_escaped() -> None:
    token = Token(0, "\x1b[2J", "text", 0, 0, 0, 0, 0)
    text = TokenizedText((token,), exceeds_max_tokens=False, model="\x1b[2J", model_version="\n")
    scores = TokenScores("contributions", np.ones(1, np.float32), 0.0, 1.0, 1.0, None)
    usage = Usage(1, 1, truncated=False)
    explanation = Explanation((token,), usage, (), 1.0, (scores,), None, "\x1b", "\n")
    model = replace(models.model("", scripted.model()), name="\x1b", version="\n", family="\x1b[2J")
    for shown in (text, explanation, Comparison(explanation, explanation, 1.0, None), model):
        assert repr(shown).isprintable()
    assert r"1 tokens: \x1b[2J" in repr(text)
