"""API keys: files, new keys, and lookups."""

import hashlib
import hmac
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens_server.access.keys import KeyRing, new_key, read_keys
from attnlens_server.errors import StartupError

HASH = hashlib.sha256(b"secret").hexdigest()


def written(directory: Path, content: str) -> Path:
    path = directory / "keys.txt"
    path.write_text(content)
    return path


def test_a_new_key_is_accepted_under_its_name(tmp_path: Path) -> None:
    key, line = new_key("search")
    assert key not in line
    assert line == f"search sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    ring = read_keys(written(tmp_path, f"# keys\n\n  {line}   # of 2026\nindex sha256:{HASH}\n"))
    assert [ring.name_of(each) for each in (key.encode(), b"secret", b"Secret", b"")] == [
        "search",
        "index",
        "",
        "",
    ]


def test_new_keys_are_long_and_different() -> None:
    keys = {new_key("a")[0] for _ in range(100)}
    assert len(keys) == 100
    assert min(map(len, keys)) >= 43  # 256 bits


def test_a_name_may_have_several_keys(tmp_path: Path) -> None:
    lines = [new_key("search") for _ in range(3)]
    ring = read_keys(written(tmp_path, "\n".join(line for _, line in lines)))
    assert {ring.name_of(key.encode()) for key, _ in lines} == {"search"}
    assert len(ring.digests_by_name()["search"]) == 3


@pytest.mark.parametrize("name", ["", "a b", "-a", "a" * 65, "ü", "a#b", "a\n", "a/b", "anonymous", "other"])
def test_invalid_names_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="is not a valid name: use up to 64 letters"):
        new_key(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "contains no API key: add the output of `attnlens key NAME`"),
        ("# nothing\n", "contains no API key"),
        (f"a sha256:{HASH}\nb secret-key\n", r"line 2 is not NAME sha256:HEX.*`attnlens key NAME`"),
        (f"a sha256:{HASH[:-1]}\n", "line 1 is not NAME"),
        (f"a sha256:{HASH.upper()}\n", "line 1 is not NAME"),
        (f"a md5:{HASH}\n", "line 1 is not NAME"),
        (f"a sha256:{HASH} more\n", "line 1 is not NAME"),
        (f"a/b sha256:{HASH}\n", "line 1 has an invalid name"),
        (f"a sha256:{HASH}\nb sha256:{HASH}\n", "line 2 repeats the key of a: remove one"),
    ],
)
def test_invalid_files_are_rejected_by_line_without_a_key(tmp_path: Path, content: str, message: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(StartupError, match=message) as caught:
        read_keys(path)
    assert str(path) in str(caught.value)
    assert "secret-key" not in str(caught.value)


def test_unreadable_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot read the API keys in .*: No such file"):
        read_keys(tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(StartupError, match="it is not UTF-8"):
        read_keys(tmp_path / "latin")


@given(st.sets(st.binary(min_size=1, max_size=8), min_size=1), st.binary(max_size=8))
def test_only_the_keys_of_a_ring_have_a_name(keys: set[bytes], other: bytes) -> None:
    ring = KeyRing({hashlib.sha256(key).digest(): key.hex() for key in keys})
    for key in keys:
        assert ring.name_of(key) == key.hex()
    assert ring.name_of(other) == (other.hex() if other in keys else "")


def test_lookups_compare_digests_once_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The structure is tested, because clocks are too coarse.

    The index of an entry depends on a secret of the process, so a caller cannot choose which entries collide
    or are near. One comparison follows, in constant time, whether or not there is an entry.
    """
    compared = []
    compare = hmac.compare_digest

    def record(first: bytes, second: bytes) -> bool:
        compared.append((len(first), len(second)))
        return compare(first, second)

    monkeypatch.setattr(hmac, "compare_digest", record)
    names = {hashlib.sha256(str(number).encode()).digest(): "a" for number in range(1000)}
    first, second = KeyRing(names), KeyRing(names)
    assert [first.name_of(key) for key in (b"5", b"x", b"")] == ["a", "", ""]
    assert compared == [(32, 32)] * 3
    assert first._entries.keys().isdisjoint(second._entries.keys())
