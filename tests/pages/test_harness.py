"""Detection of blocks and comparison of their output, on small pages with mistakes."""

from pathlib import Path

import pytest

from pages.blocks import Block, blocks_in
from pages.reader import reader
from pages.shown import difference
from served import ServerProcess

pytestmark = pytest.mark.extended

PAGE = """\
# Page

```python
print(1)
```

    1

Words between:

    $ attnlens info
    model: a
    ...
    $ attnlens embed \\
        "x"   # a comment

1. In a list:

   ```json
   {"a": 1}
   ```

Without a mark:

    attnlens list
    make test

A formula, and nothing:

    a = b

```
```
"""


def test_all_blocks_are_found_with_their_expected_output() -> None:
    found = [(block.line, block.form, block.code, block.shown) for block in blocks_in(PAGE, "page.md")]
    assert found == [
        (4, "python", "print(1)\n", "1\n"),
        (11, "command", "attnlens info", "model: a\n...\n"),
        (14, "command", 'attnlens embed "x"   # a comment', ""),
        (20, "json", '{"a": 1}\n', ""),
        (25, "command", "attnlens list", ""),
        (26, "command", "make test", ""),
        (30, "text", "a = b\n", ""),
        (33, "text", "", ""),
    ]


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("0.6674", "0.6675"),
        ("0.6674460172653198", "0.667446"),
        ("a   0.5  ████", "a 0.5 █████  "),
        ("first\n...\nlast", "first\nlast"),
        ("first\n...\nlast", "first\n1\n2\nlast\n"),
        ("first\n...", "first\n1"),
        ("1,024 tokens", "1,024 tokens"),
        ("ready at 127.0.0.1:50051: m", "ready at 127.0.0.1:41234: m"),
        ("(off by 1.4e-07).", "(off by 0.0e+00)."),
        (
            "2 threads, 2 lanes, batches of 256 tokens, warm-up 0.40 s",
            "1 thread, 1 lane, batches of 1,024 tokens, warm-up 2.31 s",
        ),
    ],
)
def test_insignificant_differences_are_accepted(shown: str, printed: str) -> None:
    assert difference(shown, printed) == ""


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("0.6674", "0.6677"),
        ("0.6674", "-0.6674"),
        ("16 tokens", "17 tokens"),
        ("a word", "another word"),
        ("v1.2", "v1.3"),
        ("first", "first\nsecond"),
        ("first\nsecond", "first"),
        ("first\n...\nlast", "first\nlast\nmore"),
        ("...\nlast", "first"),
        ("1 2", "1 2 3"),
        ("5.6e-06", "5.6e-05"),
    ],
)
def test_significant_differences_are_reported(shown: str, printed: str) -> None:
    assert difference(shown, printed) != ""


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (
            Block("page.md", 3, "python", "print(1)\n", "2\n"),
            r"page\.md:3: print\(1\)\nshown: +2\nprinted: 1",
        ),
        (Block("page.md", 3, "python", "print(1)\n"), "printed, not shown: 1"),
        (Block("page.md", 3, "python", "print(1)  # 2\n"), "shown: +2"),
        (Block("page.md", 3, "command", "attnlens inof"), "page.md:3: attnlens inof"),
        (Block("page.md", 3, "command", "false"), "page.md:3: false"),
        (Block("page.md", 3, "command", "attnlens --version", "attnlens 9"), "shown: +attnlens 9"),
        (Block("page.md", 3, "variables", "ATTNLENS_SERVE_PROT=1\n"), "no option reads ATTNLENS_SERVE_PROT"),
        (Block("page.md", 3, "rust", "fn main() {}"), "no way is known to run or parse 'rust'"),
    ],
)
def test_block_with_different_output_fails(
    block: Block, told: str, tmp_path: Path, minilm_bundle: Path, minilm_server: ServerProcess
) -> None:
    with (
        reader(tmp_path, minilm_bundle, minilm_server) as follower,
        pytest.raises(AssertionError, match=told),
    ):
        follower.follow(block)
