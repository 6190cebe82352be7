"""`attnlens encode` against a real server, and its failures against a scripted server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_client import AttentionQuery, AttentionReduction, Client, EncodedText
from scripted import ScriptedServer
from served import ServerProcess

RunHere = Callable[..., tuple[int, str, str]]

TEXT, SECOND = "It was unbelievably wet 😀.", "Rain."
TOKEN_ARRAYS = ["input_ids", "tokens", "token_sources", "token_offsets", "word_index"]


def encoded(address: str, text: str | tuple[str, str], **reduction: Any) -> tuple[EncodedText, np.ndarray]:
    query = AttentionQuery(reduction=AttentionReduction(**reduction) if reduction else None)
    with Client(address) as client:
        [found] = client.encode([text], attention=query)
        return found, client.embed([text])[0]


def states_of(found: EncodedText) -> np.ndarray:
    assert found.last_hidden_state is not None
    return found.last_hidden_state


def test_archive_contains_everything_the_server_returns(
    run_here: RunHere, minilm_server: ServerProcess, tmp_path: Path
) -> None:
    output = tmp_path / "text.npz"
    code, out, err = run_here("encode", TEXT, "-o", output, "--address", minilm_server.address)
    assert (code, out, err.endswith(f" -> {output}\n")) == (0, "", True)
    found, embedding = encoded(minilm_server.address, TEXT)
    with np.load(output) as arrays:
        assert list(arrays) == [*TOKEN_ARRAYS, "embedding", "last_hidden_state", "attention", "metadata"]
        assert arrays["tokens"].tolist() == [token.text for token in found.tokens]
        assert arrays["input_ids"].tolist() == [token.id for token in found.tokens]
        assert [TEXT[start:end] for start, end in arrays["token_offsets"]][1:3] == ["It", "was"]
        assert arrays["word_index"].tolist()[:3] == [-1, 0, 1]
        assert arrays["token_sources"].tolist()[:2] == ["special", "text"]
        np.testing.assert_allclose(arrays["embedding"], embedding, atol=1e-6)
        np.testing.assert_allclose(arrays["last_hidden_state"], states_of(found), atol=1e-5)
        np.testing.assert_allclose(arrays["attention"], found.weights, atol=1e-6)
        metadata = json.loads(str(arrays["metadata"]))
    assert metadata["attention"] == {"layers": list(range(6)), "heads": list(range(12)), "row_sum": "one"}
    assert (metadata["text"], metadata["num_tokens"], metadata["truncated"]) == (
        TEXT,
        found.num_tokens,
        False,
    )
    assert list(tmp_path.iterdir()) == [output]


def test_json_has_the_same_numbers_of_chosen_layers_and_heads_of_a_pair(
    run_here: RunHere, minilm_server: ServerProcess
) -> None:
    chosen = ("--layer", "-1", "--layer", "0", "--head", "3", "--words", "--no-special")
    code, out, _ = run_here(
        "encode", TEXT, "--text-pair", SECOND, *chosen, "--address", minilm_server.address
    )
    told = json.loads(out)
    found, embedding = encoded(minilm_server.address, (TEXT, SECOND), level="words", special_tokens="drop")
    expected = found.attention[0]
    assert (code, told["text"], told["text_pair"]) == (0, TEXT, SECOND)
    assert (told["attention"]["layers"], told["attention"]["heads"]) == ([5, 0], [3])
    np.testing.assert_allclose(told["embedding"], embedding, atol=1e-6)
    np.testing.assert_allclose(told["last_hidden_state"], states_of(found), atol=1e-5)
    np.testing.assert_allclose(told["attention"]["weights"], expected.weights[[5, 0]][:, [3]], atol=1e-6)
    assert expected.special_token_mass is not None
    assert expected.unit_ids is not None
    np.testing.assert_allclose(
        told["attention"]["special_token_mass"], expected.special_token_mass[[5, 0]][:, [3]], atol=1e-6
    )
    assert told["attention"]["unit_ids"] == expected.unit_ids.tolist()


def test_texts_of_a_file_have_numbered_arrays_and_keep_their_keys(
    run_here: RunHere, minilm_server: ServerProcess, tmp_path: Path
) -> None:
    source, output = tmp_path / "texts.jsonl", tmp_path / "texts.npz"
    lines = [{"text": TEXT, "id": "a"}, {"text": ""}, {"text": TEXT, "text_pair": SECOND}]
    source.write_text("\n\n".join(json.dumps(line) for line in lines))
    options = ("--outputs", "attention,embedding", "--batch-size", "2", "--dtype", "float16")
    args = ("--input", source, "--address", minilm_server.address)
    assert run_here("encode", *args, *options, "-o", output)[0] == 0
    with np.load(output) as arrays:
        assert len(arrays) == 3 * len([*TOKEN_ARRAYS, "embedding", "attention", "metadata"])
        descriptions = [json.loads(str(arrays[f"{row}/metadata"])) for row in range(3)]
        assert [metadata["index"] for metadata in descriptions] == [0, 1, 2]
        assert (descriptions[0]["id"], descriptions[2]["text_pair"]) == ("a", SECOND)
        counts = [metadata["num_tokens"] for metadata in descriptions]
        assert [arrays[f"{row}/attention"].shape[2] for row in range(3)] == counts
        assert arrays["1/embedding"].dtype == np.float16
        assert arrays["2/token_sources"].tolist().count("second_text") == 2
    code, out, _ = run_here("encode", *args, "--outputs", "embedding")
    told = [json.loads(line) for line in out.splitlines()]
    assert (code, [line["index"] for line in told], told[0]["id"]) == (0, [0, 1, 2], "a")
    assert "last_hidden_state" not in told[0]


def test_text_that_is_too_long_is_reported_or_truncated(
    run_here: RunHere, minilm_server: ServerProcess, tmp_path: Path
) -> None:
    source, output = tmp_path / "texts.txt", tmp_path / "texts.jsonl"
    source.write_text("short\n" + "word " * 300)
    args = ("encode", "--input", source, "-o", output, "--address", minilm_server.address)
    code, _, err = run_here(*args, "--outputs", "last_hidden_state")
    assert (code, err.count("\n"), output.exists()) == (1, 1, False)
    assert f"{source}, line 2 has 302 tokens, but the limit is 256: shorten it, or give --truncate" in err
    assert (
        "2 texts, 1 of them truncated, 259 tokens"
        in run_here(*args, "--outputs", "embedding", "--truncate")[2]
    )
    second = json.loads(output.read_text().splitlines()[1])
    assert (second["num_tokens"], second["num_tokens_total"], second["truncated"]) == (256, 302, True)


def test_gates_are_a_separate_output_and_arrays_are_streamed(
    run_here: RunHere, server: ScriptedServer, tmp_path: Path
) -> None:
    output = tmp_path / "gates.npz"
    assert run_here("encode", "abc", "-o", output, "--address", server.address)[0] == 0
    with np.load(output) as arrays:
        assert (arrays["attention"].shape, arrays["head_gates"].shape) == ((2, 2, 3, 3), (2, 3, 2))
    told = json.loads(run_here("encode", "abc", "--outputs", "head_gates", "--address", server.address)[1])
    assert np.shape(told["head_gates"]["gates"]) == (2, 3, 2)
    kinds = {type(request) for request in server.requests}
    assert kinds == {pb.GetModelRequest, pb.EmbedRequest, pb.EncodeStreamRequest}


@pytest.mark.parametrize("suffix", ["npz", "jsonl"])
def test_invalid_response_leaves_no_file(
    run_here: RunHere, server: ScriptedServer, tmp_path: Path, suffix: str
) -> None:
    def change(reply: Any) -> None:
        if isinstance(reply, pb.EncodeStreamResponse) and reply.WhichOneof("part") == "attention":
            reply.attention.layers[0] = 1

    server.change = change
    output = tmp_path / f"texts.{suffix}"
    code, _, err = run_here("encode", "abc", "-o", output, "--address", server.address)
    assert (code, err.count("\n"), list(tmp_path.iterdir())) == (76, 1, [])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give either TEXT or --input FILE"),
        (("a", "--input", __file__), "give either TEXT or --input FILE"),
        (
            ("--input", __file__, "--text-pair", "b"),
            "--text-pair goes with TEXT: in JSON lines, the second text is",
        ),
        (("a", "--outputs", "vectors"), "'vectors' is not one of embedding, last_hidden_state, attention, "),
        (("a", "--outputs", ""), "'' is not one of embedding, last_hidden_state, attention, "),
        (("a", "--outputs", "attention_composed"), "scripted has no attention_composed in these layers"),
        (
            ("a", "--layer", "2"),
            "invalid value for '--layer': 2: scripted has the layers 0 to 1, or -2 to -1",
        ),
        (("a", "--head", "-3"), "invalid value for '--head': -3: scripted has the heads 0 to 1, or -2 to -1"),
        (("a", "--text-pair", "b"), "invalid value for '--text-pair': scripted does not support text pairs"),
        (("a", "-o", "x.npy"), "x.npy must end in .npz or .jsonl or .json"),
        (
            ("--input", __file__, "-o", "x.json"),
            "--input produces JSON lines: use a file name that ends in .jsonl",
        ),
        (("a", "--prompt", "b", "--prompt-name", "c"), "give either --prompt-name or --prompt"),
        (("a", "b"), "got unexpected extra argument (b): put quotes around a text"),
    ],
)
def test_usage_error_is_reported_in_one_line(
    run_here: RunHere, server: ScriptedServer, args: tuple[str, ...], message: str
) -> None:
    code, out, err = run_here("encode", *args, "--address", server.address)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
