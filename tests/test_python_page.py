"""The examples of docs/python.md, in the order of the page, print what it shows."""

import contextlib
import io
import re
import textwrap
from pathlib import Path
from typing import Any

from served import ServerProcess

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n\n((?:    [^\n]*\n)*)", re.DOTALL | re.MULTILINE)


def test_the_examples_print_what_the_page_shows(minilm_bundle: Path, minilm_server: ServerProcess) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    examples = EXAMPLE.findall(PAGE.read_text("utf-8"))
    assert len(examples) >= 8
    for code, shown in examples:
        here = code.replace("127.0.0.1:50051", minilm_server.address)
        here = here.replace("bundles/minilm", str(minilm_bundle))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(here, str(PAGE), "exec"), names)
        found = printed.getvalue().replace(minilm_server.address, "127.0.0.1:50051")
        assert re.sub("version='[0-9a-f]{12}'", "version='VERSION'", found) == textwrap.dedent(shown)
