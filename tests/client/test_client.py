"""Results of the client with a real server, compared with plain ONNX Runtime on the same bundle."""

import asyncio
import doctest
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnlens_client
from attnlens.v1.manifest_pb2 import Activation, Architecture, Dense, PoolingDefaults
from attnlens.v1.model_pb2 import Model
from attnlens_client import AttentionPart, AttentionQuery, Client, TextPart, TokenIds
from attnlens_client.core.models import model_info
from served import ServerProcess

SENTENCE = "The animal didn't cross the street because it was too tired."
TEXTS = [SENTENCE, "", "Zoë's café in 東京 😀", "word " * 200, "It rained."]

Outputs = Callable[[str], tuple[Any, Any]]


def test_embed_returns_the_normalized_mean_of_the_token_vectors(client: Client, outputs: Outputs) -> None:
    means = np.stack([outputs(text)[0].mean(axis=0) for text in TEXTS])
    expected = means / np.linalg.norm(means, axis=1, keepdims=True)
    vectors = client.embed(TEXTS)
    assert vectors.dtype == np.float32
    assert np.abs(vectors - expected).max() <= 1e-5


def test_pooling_normalization_and_dimensions_are_applied(client: Client, outputs: Outputs) -> None:
    last_hidden_state, _ = outputs(SENTENCE)
    raw = client.embed([SENTENCE], pooling="cls", normalize=False)[0]
    assert np.abs(raw - last_hidden_state[0]).max() <= 1e-5
    largest = client.embed([SENTENCE], pooling="max", normalize=False, dimensions=16)[0]
    assert np.abs(largest - last_hidden_state.max(axis=0)[:16]).max() <= 1e-5


def test_fp16_halves_the_size_and_keeps_the_values(client: Client) -> None:
    full, half = client.embed(TEXTS), client.embed(TEXTS, dtype="float16")
    assert half.dtype == np.float16
    assert np.abs(full - half).max() <= 1e-3


def test_no_texts_return_an_empty_array_of_the_model_width(client: Client) -> None:
    assert client.embed([]).shape == (0, 384)
    assert client.embed([], dimensions=8, dtype="float16").shape == (0, 8)
    assert client.encode([]) == []
    assert list(client.encode_stream([])) == []
    assert client.tokenize([]) == []


def test_vectors_are_writable(client: Client) -> None:
    vectors = client.embed(["It rained."])
    vectors *= 2
    assert np.linalg.norm(vectors) == pytest.approx(2, abs=1e-5)


def test_encode_returns_the_last_hidden_state_and_every_attention_map(
    client: Client, outputs: Outputs
) -> None:
    for text, result in zip(TEXTS, client.encode(TEXTS, attention=AttentionQuery()), strict=True):
        last_hidden_state, weights = outputs(text)
        assert result.last_hidden_state is not None
        assert np.abs(result.last_hidden_state - last_hidden_state).max() <= 1e-5
        assert np.abs(result.weights - weights).max() <= 1e-5
        [attention] = result.attention
        assert (attention.layers, attention.heads) == (tuple(range(6)), tuple(range(12)))
        assert (attention.layout, attention.row_sum) == ("dense", "one")
        assert len(result.tokens) == result.num_tokens == len(last_hidden_state)


def test_layers_and_heads_keep_the_requested_order(client: Client, outputs: Outputs) -> None:
    _, weights = outputs(SENTENCE)
    query = AttentionQuery(layers=[-1, 0], heads=[3, -12])
    [result] = client.encode([SENTENCE], attention=query, last_hidden_state=False)
    [attention] = result.attention
    assert (attention.layers, attention.heads, result.last_hidden_state) == ((5, 0), (3, 0), None)
    assert np.abs(attention.weights - weights[[5, 0]][:, [3, 0]]).max() <= 1e-5


def test_several_attention_queries_keep_their_order(client: Client, outputs: Outputs) -> None:
    _, weights = outputs(SENTENCE)
    queries = [AttentionQuery(view="head_mean"), AttentionQuery(layers=[2], heads=[0])]
    for [result] in (
        client.encode([SENTENCE], attention=queries),
        list(client.encode_stream([SENTENCE], attention=queries)),
    ):
        mean, one = result.attention
        assert np.abs(mean.weights - weights.mean(axis=1, keepdims=True)).max() <= 1e-5
        assert np.abs(one.weights - weights[[2]][:, [0]]).max() <= 1e-5
        assert (mean.query, one.query) == tuple(queries)
        with pytest.raises(ValueError, match="there are 2 queries"):
            _ = result.weights


def test_last_hidden_state_alone_has_no_attention(client: Client) -> None:
    [result] = client.encode([SENTENCE])
    assert result.attention == ()
    with pytest.raises(ValueError, match="there are 0 queries"):
        _ = result.weights


def test_results_include_the_model_and_its_version(client: Client) -> None:
    model = client.get_model()
    expected = (model.name, model.version)
    assert len(model.version) == 64
    embeddings, empty = client.embed_with_usage([SENTENCE]), client.embed_with_usage([])
    [encoded], [tokenized] = client.encode([SENTENCE]), client.tokenize([SENTENCE])
    [streamed] = client.encode_stream([SENTENCE])
    for result in (embeddings, empty, encoded, streamed, tokenized):
        assert (result.model, result.model_version) == expected
    version = f"model={model.name!r}, version={model.version[:12]!r}"
    assert repr(embeddings) == f"Embeddings(float32 (1, 384), {version})"
    shape = (encoded.num_tokens, 384)
    assert repr(encoded) == f"EncodedText({shape[0]} tokens, last_hidden_state float32 {shape}, {version})"
    sizes = "ready, bert, 6 layers, 12 heads, hidden size 384"
    assert repr(model) == f"ModelInfo({model.name!r}, version={model.version[:12]!r}, {sizes})"


def test_text_gets_the_same_vector_alone_and_in_a_batch(client: Client, passages: list[str]) -> None:
    together = client.embed(passages[:100], truncate=True)
    alone = np.concatenate([client.embed([text], truncate=True) for text in passages[:100:9]])
    assert np.abs(together[::9] - alone).max() <= 1e-5


def test_results_of_many_calls_keep_text_order(
    minilm_server: ServerProcess, client: Client, passages: list[str]
) -> None:
    with Client(minilm_server.address, batch_size=7, max_in_flight=5) as many_calls:
        parts = many_calls.embed_with_usage(passages[:200], truncate=True)
    assert np.abs(parts.vectors - client.embed(passages[:200], truncate=True)).max() <= 1e-5
    assert len(parts.usages) == 200
    tokens = [len(text.tokens) for text in client.tokenize(passages[:200])]
    assert [usage.num_tokens_total for usage in parts.usages] == tokens
    assert any(usage.truncated for usage in parts.usages) == (max(tokens) > 256)


def test_requests_beyond_the_servers_limits_are_split(minilm_bundle: Path, passages: list[str]) -> None:
    limits = ("--max-inputs-per-request", "5", "--max-response-bytes", "65536")
    text_limits = ("--max-text-bytes", "60000", "--max-request-text-bytes", "60000")
    with ServerProcess(minilm_bundle, *limits, *text_limits) as server, Client(server.address) as client:
        assert client.embed(passages[:60], truncate=True).shape == (60, 384)
        short = [text[:40] for text in passages[:20]]
        assert len(client.encode(short, attention=AttentionQuery(layers=[-1], view="head_mean"))) == 20
        assert len(client.tokenize(passages[:20])) == 20
        one_map = AttentionQuery(layers=[0], heads=[0])
        assert [text.num_tokens for text in client.encode_stream(short, attention=one_map)] == [
            len(text.tokens) for text in client.tokenize(short)
        ]


def test_token_ids_give_the_same_result_as_their_text(client: Client) -> None:
    [tokenized] = client.tokenize([SENTENCE])
    ids = [token.id for token in tokenized.tokens]
    assert np.abs(client.embed([ids]) - client.embed([SENTENCE])).max() <= 1e-6
    assert np.abs(client.embed([np.array(ids)]) - client.embed([SENTENCE])).max() <= 1e-6  # type: ignore[list-item]
    assert np.abs(client.embed([TokenIds(ids)]) - client.embed([SENTENCE])).max() <= 1e-6
    [encoded] = client.encode([TokenIds(ids, [0] * len(ids))])
    assert {token.source for token in encoded.tokens} == {"ids"}


def test_pair_is_one_input_with_tokens_of_both_texts(client: Client) -> None:
    pair = ("Who rained?", "It rained.")
    [tokenized] = client.tokenize([pair])
    assert [(token.text, token.source) for token in tokenized.tokens] == [
        ("[CLS]", "special"), ("who", "text"), ("rained", "text"), ("?", "text"), ("[SEP]", "special"),
        ("it", "second_text"), ("rained", "second_text"), (".", "second_text"), ("[SEP]", "special"),
    ]  # fmt: skip
    for token in tokenized.tokens:
        if not token.is_special:
            source = pair[token.source == "second_text"]
            assert source[token.char_start : token.char_end].lower() == token.text
    ids = [token.id for token in tokenized.tokens]
    token_type_ids = [0] * 5 + [1] * 4
    assert np.abs(client.embed([pair]) - client.embed([TokenIds(ids, token_type_ids)])).max() <= 1e-6
    [encoded] = client.encode([pair], attention=AttentionQuery(layers=[0]))
    assert encoded.weights.shape == (1, 12, 9, 9)
    assert encoded.tokens == tokenized.tokens
    assert [text.tokens for text in client.encode_stream([pair])] == [encoded.tokens]


def test_prompt_tokens_are_marked(client: Client) -> None:
    for tokens in (
        client.tokenize(["It rained."], prompt="query: ")[0].tokens,
        client.encode(["It rained."], prompt="query: ")[0].tokens,
    ):
        assert [(token.text, token.source) for token in tokens] == [
            ("[CLS]", "special"), ("query", "prompt"), (":", "prompt"), ("it", "text"), ("rained", "text"),
            (".", "text"), ("[SEP]", "special"),
        ]  # fmt: skip
        assert (tokens[1].char_start, tokens[3].char_start) == (0, 0)


def test_offsets_point_at_the_source_of_each_token(client: Client) -> None:
    text = "Zoë's café: 東京 😀!"
    [tokenized] = client.tokenize([text])
    assert not tokenized.exceeds_max_tokens
    for token in tokenized.tokens:
        source = text[token.char_start : token.char_end]
        assert text.encode()[token.byte_start : token.byte_end].decode() == source
        assert token.is_special == (token.word_index is None) == (source == "")
    assert client.tokenize(["word " * 300])[0].exceeds_max_tokens


def test_stream_returns_the_same_results_as_encode(minilm_server: ServerProcess, client: Client) -> None:
    query = AttentionQuery(layers=[1, -1])
    encoded = client.encode(TEXTS, attention=query)
    with Client(minilm_server.address, batch_size=2) as many_calls:
        streamed = list(many_calls.encode_stream(TEXTS, attention=query))
    for one, other in zip(encoded, streamed, strict=True):
        assert one.last_hidden_state is not None
        assert other.last_hidden_state is not None
        assert np.abs(one.last_hidden_state - other.last_hidden_state).max() <= 1e-5
        assert np.abs(one.weights - other.weights).max() <= 1e-5
        assert one.tokens == other.tokens
        [attention], [streamed_attention] = one.attention, other.attention
        assert (attention.layers, attention.heads) == (streamed_attention.layers, streamed_attention.heads)
    assert [text.attention for text in client.encode_stream(TEXTS)] == [()] * len(TEXTS)


def test_stream_parts_are_a_header_followed_by_the_layers(minilm_server: ServerProcess) -> None:
    queries = [AttentionQuery(layers=[4, 0]), AttentionQuery(layers=[2])]
    with Client(minilm_server.address, batch_size=1) as client:
        parts = list(client.encode_stream_parts(["It rained.", "It was wet."], attention=queries))
    assert [(part.input_index, type(part)) for part in parts] == [
        (index, kind) for index in (0, 1) for kind in (TextPart, AttentionPart, AttentionPart, AttentionPart)
    ]
    layers = [(part.query_index, part.layer) for part in parts if isinstance(part, AttentionPart)]
    assert layers == [(0, 4), (0, 0), (1, 2)] * 2


def test_client_is_usable_after_a_stream_is_closed_early(client: Client) -> None:
    stream = client.encode_stream(["word " * 200] * 40, attention=AttentionQuery())
    assert next(stream).num_tokens == 202
    stream.close()
    assert client.embed(["It rained."]).shape == (1, 384)


def test_model_reports_its_sizes_and_limits(client: Client) -> None:
    model = client.get_model()
    assert client.list_models() == [model] == [client.get_model(model.name)]
    assert (model.hidden_size, model.num_layers, model.num_heads, model.max_tokens) == (384, 6, 12, 256)
    assert (model.pooling, model.normalize, model.family) == ("mean", True, "bert")
    assert model.parity.passed
    assert {figure.role for figure in model.parity.figures} >= {"last_hidden_state", "attention_weights"}
    assert all(gate.graph and gate.kind.startswith(("max_", "min_", "mean_")) for gate in model.parity.gates)
    assert (model.state, model.precision, model.supports_text_pairs) == ("ready", "fp32", True)
    assert [(layer.attention, layer.num_heads) for layer in model.layers] == [("softmax", 12)] * 6
    maps = [output for output in model.outputs if output.role == "attention_weights"]
    assert [(output.layer, output.layout, output.row_sum) for output in maps] == [
        (layer, "dense", "one") for layer in range(6)
    ]
    assert model.execution_providers == ("CPUExecutionProvider",)
    assert "onnxruntime" in model.versions


def test_unknown_enum_values_are_shown_as_unknown() -> None:
    dense = [Dense(activation=98), Dense(activation=Activation.ACTIVATION_TANH)]  # type: ignore[arg-type]
    pooling = PoolingDefaults(pooling=99, dense=dense)  # type: ignore[arg-type]
    model = model_info(Model(architecture=Architecture(hidden_size=24), pooling=pooling, state=77))  # type: ignore[arg-type]
    assert (model.pooling, model.state) == ("unknown (99)", "unknown (77)")
    assert [layer.activation for layer in model.dense] == ["unknown (98)", "tanh"]


def test_documentation_examples_are_correct(minilm_server: ServerProcess, client: Client) -> None:
    names = {**vars(attnlens_client), "asyncio": asyncio, "client": client, "address": minilm_server.address}
    names["itertools"] = itertools
    kinds = (
        attnlens_client.BlockingMethods,
        attnlens_client.Client,
        attnlens_client.AsyncClient,
        attnlens_client.AttentionQuery,
    )
    finder = doctest.DocTestFinder()
    examples = [
        test for kind in kinds for test in finder.find(kind, kind.__name__, module=False, globs=names)
    ]
    runner = doctest.DocTestRunner()
    for example in examples:
        runner.run(example)
    assert runner.summarize().failed == 0
    assert sum(len(example.examples) for example in examples) >= 12
