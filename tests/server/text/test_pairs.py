"""Text pairs checked against transformers: tokens, truncation and model outputs."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from attnlens.tensors import from_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens.v1.manifest_pb2 import Pooling
from attnlens_server.text import TextEncoder, TokenSource
from failures import read_failure
from served import ServerProcess
from token_spans import described

DATA = Path(__file__).parents[2] / "data"
PAIRS = [tuple(line.split("\t")) for line in (DATA / "pairs.tsv").read_text("utf-8").splitlines()]
SHORT_PAIRS = [
    ("the man", "a café"),
    ("a 😀 the", "the 東京 man"),
    ("", "the"),
    ("the", ""),
    ("  the ", " the  man "),
    ("the man and the " * 3, "a"),
    ("a the man " * 4, "the man a " * 5),
]
MAX_TOKENS = 256
ATOL = 1e-5
HEADS = pb.AttentionQuery()

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def inputs(pairs: Sequence[tuple[str, ...]]) -> list[pb.Input]:
    return [pb.Input(text_pair=pb.TextPair(first=first, second=second)) for first, second in pairs]


def test_pairs_are_diverse() -> None:
    lengths = [len(first) + len(second) for first, second in PAIRS]
    assert len(PAIRS) == 18
    assert min(lengths) < 80
    assert max(lengths) > 1500


# --- MiniLM ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS, ids=range(len(PAIRS)))
def test_tokens_match_transformers(minilm_dir: Path, pair: tuple[str, str]) -> None:
    text_encoder = TextEncoder(minilm_dir / "tokenizer.json", MAX_TOKENS)
    [encoded] = text_encoder.encode([pair], with_record=True)
    reference: Any = AutoTokenizer.from_pretrained(minilm_dir)
    whole = reference(*pair, truncation=False)
    cut = reference(*pair, truncation=True, max_length=MAX_TOKENS, return_offsets_mapping=True)
    assert encoded.input_ids.tolist() == cut["input_ids"]
    assert encoded.token_type_ids is not None
    assert encoded.token_type_ids.tolist() == cut["token_type_ids"]
    assert (encoded.num_tokens, encoded.num_tokens_total) == (len(cut["input_ids"]), len(whole["input_ids"]))
    tokens = described(encoded, text_encoder)
    sources = {None: TokenSource.SPECIAL, 0: TokenSource.TEXT, 1: TokenSource.SECOND_TEXT}
    assert [token.source for token in tokens] == [sources[number] for number in cut.sequence_ids()]
    assert [token.chars for token in tokens] == cut["offset_mapping"]
    assert [token.word for token in tokens] == cut.word_ids()


@pytest.fixture(scope="module")
def reference(minilm_dir: Path) -> Callable[[tuple[str, ...]], dict[str, Any]]:
    """Compute token vectors and attention of all layers for a pair with transformers."""
    tokenizer: Any = AutoTokenizer.from_pretrained(minilm_dir)
    model: Any = AutoModel.from_pretrained(minilm_dir, attn_implementation="eager").eval()

    def run(pair: tuple[str, ...]) -> dict[str, Any]:
        encoded = tokenizer(*pair, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        with torch.no_grad():
            out = model(**encoded, output_attentions=True)
        weights = np.concatenate([layer.numpy() for layer in out.attentions])
        return {"hidden": out.last_hidden_state[0].numpy(), "weights": weights}

    return run


def test_vectors_of_all_pairs_match_transformers(
    stub: EncoderServiceStub, reference: Callable[[tuple[str, ...]], dict[str, Any]]
) -> None:
    response = stub.Embed(pb.EmbedRequest(inputs=inputs(PAIRS), truncate=True))
    assert [usage.truncated for usage in response.usages].count(True) == 1
    for vector, pair in zip(from_tensor(response.embeddings), PAIRS, strict=True):
        mean = reference(pair)["hidden"].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=ATOL)


def test_token_vectors_and_attention_of_pairs_match_transformers(
    stub: EncoderServiceStub, reference: Callable[[tuple[str, ...]], dict[str, Any]]
) -> None:
    request = pb.EncodeRequest(inputs=inputs(PAIRS[:15]), last_hidden_state=True, attention=[HEADS])
    for pair, result in zip(PAIRS, stub.Encode(request).results, strict=False):
        expected = reference(pair)
        np.testing.assert_allclose(from_tensor(result.last_hidden_state), expected["hidden"], atol=2 * ATOL)
        np.testing.assert_allclose(from_tensor(result.attention[0].dense), expected["weights"], atol=ATOL)


def test_pair_differs_from_concatenation_but_matches_ids_with_types(stub: EncoderServiceStub) -> None:
    [pair] = inputs(PAIRS[:1])
    tokens = stub.Tokenize(pb.TokenizeRequest(inputs=[pair])).results[0].tokens
    ids = [token.id for token in tokens]
    length_of_first = ids.index(102) + 1  # up to and including its [SEP]
    types = [0] * length_of_first + [1] * (len(ids) - length_of_first)
    request = pb.EmbedRequest(
        inputs=[
            pair,
            pb.Input(token_ids=pb.TokenIds(input_ids=ids, token_type_ids=types)),
            pb.Input(token_ids=pb.TokenIds(input_ids=ids)),
            pb.Input(text=" ".join(PAIRS[0])),
        ]
    )
    paired, with_types, without, in_a_row = from_tensor(stub.Embed(request).embeddings)
    np.testing.assert_allclose(with_types, paired, atol=1e-6)
    assert np.abs(without - paired).max() > 1e-3
    assert np.abs(in_a_row - paired).max() > 1e-3


def test_prompt_precedes_the_first_text(stub: EncoderServiceStub) -> None:
    request = pb.TokenizeRequest(inputs=inputs([("a cat", "the mat")]), prompt=pb.Prompt(text="query: "))
    tokens = stub.Tokenize(request).results[0].tokens
    assert [(token.text, token.source, token.char_start, token.char_end) for token in tokens] == [
        ("[CLS]", pb.TOKEN_SOURCE_SPECIAL, 0, 0),
        ("query", pb.TOKEN_SOURCE_PROMPT, 0, 5),
        (":", pb.TOKEN_SOURCE_PROMPT, 5, 6),
        ("a", pb.TOKEN_SOURCE_TEXT, 0, 1),
        ("cat", pb.TOKEN_SOURCE_TEXT, 2, 5),
        ("[SEP]", pb.TOKEN_SOURCE_SPECIAL, 0, 0),
        ("the", pb.TOKEN_SOURCE_SECOND_TEXT, 0, 3),
        ("mat", pb.TOKEN_SOURCE_SECOND_TEXT, 4, 7),
        ("[SEP]", pb.TOKEN_SOURCE_SPECIAL, 0, 0),
    ]
    # A token that starts in the prompt and ends in the text belongs to the text.
    request = pb.TokenizeRequest(inputs=[pb.Input(text="ing a é")], prompt=pb.Prompt(text="é embedd"))
    [_, *inner, _] = stub.Tokenize(request).results[0].tokens
    assert [(token.text, token.source, token.byte_start, token.byte_end) for token in inner] == [
        ("e", pb.TOKEN_SOURCE_PROMPT, 0, 2),
        ("em", pb.TOKEN_SOURCE_PROMPT, 3, 5),
        ("##bed", pb.TOKEN_SOURCE_PROMPT, 5, 8),
        ("##ding", pb.TOKEN_SOURCE_TEXT, 0, 3),
        ("a", pb.TOKEN_SOURCE_TEXT, 4, 5),
        ("e", pb.TOKEN_SOURCE_TEXT, 6, 8),
    ]


# --- other tokenizers and models -------------------------------------------------------------------


@pytest.fixture(scope="module", params=["wordpiece", "byte-level", "unigram"])
def small(request: pytest.FixtureRequest, small_bundle: Callable[[str], Path]) -> Path:
    return small_bundle(request.param)


@pytest.fixture(scope="module")
def small_stub(small: Path) -> Iterator[EncoderServiceStub]:
    with ServerProcess(small) as server, grpc.insecure_channel(server.address) as channel:
        yield EncoderServiceStub(channel)


def test_each_tokenizer_joins_pairs_like_transformers(small: Path, small_stub: EncoderServiceStub) -> None:
    max_tokens = small_stub.GetModel(pb.GetModelRequest()).model.max_tokens
    source = small.parent / "source"
    tokenizer: Any = AutoTokenizer.from_pretrained(small)
    model: Any = AutoModel.from_pretrained(source).eval()
    request = pb.EmbedRequest(
        inputs=inputs(SHORT_PAIRS), truncate=True, pooling=Pooling.POOLING_MEAN, normalize=False
    )
    found = from_tensor(small_stub.Embed(request).embeddings)
    encode = pb.EncodeRequest(inputs=inputs(SHORT_PAIRS), truncate=True)
    texts = small_stub.Encode(encode).results
    for pair, vector, text in zip(SHORT_PAIRS, found, texts, strict=True):
        # Batched, since transformers treats a single empty second text as missing.
        cut = tokenizer([pair], truncation=True, max_length=max_tokens, return_tensors="pt")
        assert [token.id for token in text.tokens] == cut["input_ids"][0].tolist(), pair
        with torch.no_grad():
            hidden = model(**cut).last_hidden_state[0].numpy()
        np.testing.assert_allclose(from_tensor(text.last_hidden_state), hidden, atol=ATOL)
        np.testing.assert_allclose(vector, hidden.mean(axis=0), atol=ATOL)


def test_offsets_in_a_pair_match_those_of_each_text_alone(small_stub: EncoderServiceStub) -> None:
    pairs = [pair for pair in SHORT_PAIRS if sum(map(len, pair)) < 30]
    tokenized = small_stub.Tokenize(pb.TokenizeRequest(inputs=inputs(pairs))).results
    for pair, result in zip(pairs, tokenized, strict=True):
        for text, source in zip(pair, (pb.TOKEN_SOURCE_TEXT, pb.TOKEN_SOURCE_SECOND_TEXT), strict=True):
            of_text = [token for token in result.tokens if token.source == source]
            alone = small_stub.Tokenize(pb.TokenizeRequest(inputs=[pb.Input(text=text)])).results[0].tokens
            expected = [token for token in alone if token.source == pb.TOKEN_SOURCE_TEXT]
            for token in expected:
                token.source = source
            assert of_text == expected


def test_model_without_pairs_rejects_them_by_field(
    small_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    from tampered import copy_of, manifest_of  # noqa: PLC0415 - imports onnx

    bundle = copy_of(small_bundle("wordpiece"), tmp_path)
    with manifest_of(bundle) as manifest:
        manifest["supports_text_pairs"] = False
    with ServerProcess(bundle) as server, grpc.insecure_channel(server.address) as channel:
        stub = EncoderServiceStub(channel)
        assert not stub.GetModel(pb.GetModelRequest()).model.supports_text_pairs
        mixed = [pb.Input(text="the"), *inputs([("the", "man")])]
        calls: list[Callable[[], object]] = [
            lambda: stub.Embed(pb.EmbedRequest(inputs=mixed)),
            lambda: stub.Encode(pb.EncodeRequest(inputs=mixed)),
            lambda: stub.Tokenize(pb.TokenizeRequest(inputs=mixed)),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert read_failure(caught.value).violations == {
                "inputs[1].text_pair": "is not supported by this model: send text"
            }
