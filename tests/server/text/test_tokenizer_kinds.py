"""Each tokenizer type, from the vocabulary of a checkpoint to the tokens returned by a server."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from attnlens_client import AttnlensError, Client
from attnlens_server import local
from served import ServerProcess
from small_files import sign
from token_spans import TABLES

KINDS = ("wordpiece", "byte-level", "unigram")


@pytest.fixture(scope="module", params=KINDS)
def kind_and_address(
    request: pytest.FixtureRequest, small_bundle: Callable[[str], Path]
) -> Iterator[tuple[str, str]]:
    with ServerProcess(small_bundle(request.param)) as server:
        yield request.param, server.address


def test_client_receives_the_hand_counted_offsets(kind_and_address: tuple[str, str]) -> None:
    kind, address = kind_and_address
    expected = TABLES[kind]
    texts = [text for text in expected if text]
    with Client(address) as client:
        tokenized = client.tokenize(texts)
        encoded = client.encode(texts)
    for text, whole, result in zip(texts, tokenized, encoded, strict=True):
        assert result.tokens == whole.tokens
        assert [token.id for token in result.tokens[1:-1]] == [token.id for token in whole.tokens[1:-1]]
        first, *tokens, last = result.tokens
        assert {first.source, last.source} == {"special"}
        assert [
            (token.text, (token.char_start, token.char_end), (token.byte_start, token.byte_end))
            for token in tokens
        ] == expected[text]


def test_server_rejects_a_text_with_a_token_that_has_no_embedding(
    small_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = shutil.copytree(small_bundle("wordpiece"), tmp_path / "bundle")
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    tokenizer.add_tokens(["<image>"])
    tokenizer.save(str(bundle / "tokenizer.json"))
    sign(bundle)
    with local(bundle, threads=1) as model:
        assert model.embed(["fine"]).shape == (1, 96)
        with pytest.raises(AttnlensError, match=r"texts\[1\] contains the token '<image>', for which"):
            model.embed(["fine", "an <image>"])


def test_attend_finds_a_word_split_into_several_tokens(kind_and_address: tuple[str, str]) -> None:
    kind, address = kind_and_address
    text = "a café the"
    command = [sys.executable, "-m", "attnlens_cli.main", "attend", text, "--address", address]
    result = subprocess.run([*command, "--token", "café"], capture_output=True, encoding="utf-8", check=True)
    assert result.stdout.count("attends to:") == {"wordpiece": 4, "byte-level": 5, "unigram": 3}[kind]
    printed = subprocess.run([*command, "--json"], capture_output=True, encoding="utf-8", check=True).stdout
    tokens = json.loads(printed)["tokens"]
    held = [text[token["char_start"] : token["char_end"]] for token in tokens if token["source"] != "special"]
    assert (
        held
        == {
            "wordpiece": ["a", "c", "a", "f", "é", "the"],
            "byte-level": ["a", "c", "a", "f", "é", "é", "the"],
            "unigram": ["a", "ca", "f", "é", "the"],
        }[kind]
    )
