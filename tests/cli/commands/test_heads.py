"""`attnlens heads` on MiniLM: output formats and usage errors."""

import json
import re
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from schemas import conforms

Run = Callable[..., subprocess.CompletedProcess[str]]

TREEBANK = """\
1	The	_	DET	_	_	2	det	_	_
2	animal	_	NOUN	_	_	4	nsubj	_	_
3	didn't	_	AUX	_	_	4	aux	_	_
4	cross	_	VERB	_	_	0	root	_	_
5	the	_	DET	_	_	6	det	_	_
6	street	_	NOUN	_	_	4	obj	_	_
7	.	_	PUNCT	_	_	4	punct	_	_

1	<b>	_	DET	_	_	2	det	_	_
2	rained	_	VERB	_	_	0	root	_	_
3	so	_	ADV	_	_	2	advmod	_	_
4	it	_	PRON	_	_	2	nsubj	_	_
5	.	_	PUNCT	_	_	2	punct	_	_
"""


class Links(HTMLParser):
    """URLs that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [value or "" for name, value in attrs if name in {"src", "href", "srcset", "data"}]


@pytest.fixture
def treebank(tmp_path: Path) -> Path:
    path = tmp_path / "mine & yours.conllu"
    path.write_text(TREEBANK, encoding="utf-8")
    return path


def test_treebank_report_has_every_format(
    run: Run, minilm_bundle: Path, treebank: Path, tmp_path: Path
) -> None:
    pairs = tmp_path / "pairs.csv"
    pairs.write_text(
        'first,second,score\nA cat.,"A dog, too.",1\nIt rained.,It poured.,4.5\n', encoding="utf-8"
    )
    outputs = [
        argument
        for kind, name in (("--json", "h.json"), ("--markdown", "h.md"), ("--html", "h.html"))
        for argument in (kind, tmp_path / name)
    ]
    result = run("heads", minilm_bundle, "--conllu", treebank, "--stsb", pairs, "--threads", 1, *outputs)
    assert (result.returncode, result.stderr) == (0, "")
    report = conforms("heads", (tmp_path / "h.json").read_text("utf-8"))
    assert (report["schema"], report["model"]) == (1, "all-MiniLM-L6-v2")
    assert report["data"]["name"] == treebank.name
    assert (report["data"]["sentences"], report["data"]["rows"]) == (2, 9 + 7)  # didn't and <b> have 3 tokens
    assert [(head["layer"], head["head"]) for head in report["heads"]] == [
        (layer, head) for layer in range(6) for head in range(12)
    ]
    assert report["heads"][2]["labels"][0] == "previous-token"
    assert report["heads"][2]["previous"] > 0.99
    assert max(abs(head["task_change"]) for head in report["heads"]) <= 2
    assert report["importance"]["texts"] == report["task"]["pairs"] == 2
    relations = {relation["relation"]: relation for relation in report["syntax"]}
    assert set(relations) == {"all", "det", "nsubj", "aux", "obj"}  # chosen on the first sentence
    assert relations["det"]["num_scored"] == 1
    assert relations["obj"]["scored"] is None
    assert not any(relation["labeled"] for relation in report["syntax"])
    assert report["distances"] is None  # fewer than 12 tokens
    assert any(note.startswith("Near and distant tokens were not compared") for note in report["notes"])
    kinds = {score["kind"]: score for score in report["coreference"]}
    assert list(kinds) == ["all", "gender", "number", "meaning"]
    assert kinds["all"]["num_chosen"] + kinds["all"]["num_scored"] == 290
    assert not kinds["all"]["labeled"]
    for index, related in enumerate(report["relatedness"]["heads"]):
        head = report["heads"][index]
        assert (related["layer"], related["head"]) == (head["layer"], head["head"])
        assert abs(related["synonym"] - related["unrelated"] - head["synonym"]) < 1e-6
        assert related["synonym_interval"][0] <= head["synonym"] <= related["synonym_interval"][1]
        assert (related["synonym_interval"][0] > 0.02) == ("semantic" in head["labels"])
    page = (tmp_path / "h.html").read_text("utf-8")
    check_page(page)
    check_maps(page, report["baselines"]["diagonal_chance"])
    markdown = (tmp_path / "h.md").read_text("utf-8")
    assert "\n| L0H2 | 1.000 | " in markdown
    assert "\n## Related words\n" in markdown
    assert "\n| same word | L2H9 | " in markdown


def check_maps(page: str, chance: float) -> None:
    """Check that results come first, and that colors show the difference from chance on a common scale."""
    assert (
        page.index("<h2>Labels") < page.index("<h2>Layers and heads") < page.index("<h2>How it was measured")
    )
    for title, expected in (("previous", 0.0), ("self", chance), ("entropy / ln T", 1.0)):
        figure = page.split(f"<figcaption>{title}<")[1].split("</figure>", maxsplit=1)[0]
        squares = re.findall(r"var\(--(\w+)\) (\d+)%.*?<title>L\d+H\d+: ([\d.]+)", figure)
        assert len(squares) == 72
        for color, shade, value in squares:
            assert abs(int(shade) - 100 * abs(float(value) - expected)) < 0.6
            assert (color == "negative") == (float(value) < expected - 1e-3) or int(shade) == 0
    assert '<td class="words"><span>L0H2</span>' in page  # lines break between heads and labels


def check_page(page: str) -> None:
    links = Links()
    links.feed(page)
    assert links.found == []
    assert "b" not in links.tags
    assert "mine &amp; yours.conllu" in page
    assert "@" not in page.split("<body>")[1].split("<script>", maxsplit=1)[0].replace("@15d613d", "")
    for table in page.split("<table>")[1:]:  # headings are aligned with their columns
        heading, *rows = (
            re.findall(r"<t[hd]([^>]*)>", row) for row in table.split("</table>")[0].split("<tr>")[1:]
        )
        assert all([cell.removeprefix(' scope="col"') for cell in heading] == row for row in rows)
    assert "mean weight on the next token" in page
    assert (
        page.index("<h2>Pronouns</h2>")
        < page.index("<h2>Related words</h2>")
        < page.index("<h2>Measures</h2>")
    )
    assert "Near and distant tokens</h2>" not in page


def test_terminal_shows_labels_rules_and_the_license(
    run: Run, minilm_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlens_analysis.heads.tied.NUM_TEXTS", 1)  # its values are not checked here
    result = run("heads", minilm_bundle, "--importance-texts", 0, "--threads", 1, env={"COLUMNS": "80"})
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "all-MiniLM-L6-v2: 72 heads"
    assert "CC BY-SA 4.0" in result.stdout
    assert any(
        line.split()[:1] == ["L0H2"] and line.endswith("previous-token, local")
        for line in map(str.rstrip, lines)
    )
    assert any(line.split()[:4] == ["obj", "L2H0", "to", "head"] for line in lines)
    for title in ("Pronouns", "Near and distant tokens", "Related words"):
        assert title in lines
    assert any(
        line.split()[:2] == ["local", "L0H2"] and line.endswith("yes") for line in map(str.rstrip, lines)
    )
    assert "- syntax:RELATION: best head for the relation" in result.stdout
    assert "A label describes where a head attends" in result.stdout
    assert max(map(len, lines)) <= 80


def test_plain_lines_have_no_relations(run: Run, minilm_bundle: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("It rained, so everything was wet.\n" + "word " * 400 + "\n", encoding="utf-8")
    output = tmp_path / "heads.json"
    result = run(
        "heads", minilm_bundle, "--texts", texts, "--importance-texts", 0, "--threads", 1, "--json", output
    )
    assert result.stdout == f"{output}: 72 heads, {result.stdout.split(', ')[1]}"
    report = json.loads(output.read_text("utf-8"))
    assert report["syntax"] is report["importance"] is None
    assert report["coreference"] is not None  # measured on other sentences
    assert "Texts skipped because they exceed 256 tokens: 1." in report["notes"]


@pytest.mark.parametrize(
    ("options", "content", "code", "message"),
    [
        (["--conllu"], "1\ta\n", 1, "line 1: found 2 columns, but CoNLL-U has 10"),
        (["--texts"], "\n", 1, "contains no text"),
        (["--texts"], "No.\n", 1, "has at least 8 tokens"),
        (["--stsb"], "a,b\n", 1, "line 1: 2 columns instead of text, text, score"),
        (["--stsb"], "a,b,1\na,b,high\n", 1, "line 2, column 3: 'high' is not a number"),
        (["--stsb"], "a,b,1\n", 1, "needs at least two pairs with different scores"),
        (["--html", "heads.txt", "--texts"], "It rained.\n", 2, "must end in .html or .htm"),
    ],
)
def test_usage_error_is_reported_in_one_line(
    run: Run, minilm_bundle: Path, tmp_path: Path, options: list[str], content: str, code: int, message: str
) -> None:
    path = tmp_path / "input"
    path.write_text(content, encoding="utf-8")
    result = run("heads", minilm_bundle, *options, path)
    assert result.returncode == code
    assert message in result.stderr
    assert result.stdout == ""


def test_text_sources_are_mutually_exclusive(run: Run, minilm_bundle: Path, treebank: Path) -> None:
    result = run("heads", minilm_bundle, "--conllu", treebank, "--texts", treebank)
    assert result.returncode == 2
    assert "exclude each other" in result.stderr


def test_path_that_is_not_a_bundle_is_reported(run: Run, tmp_path: Path) -> None:
    result = run("heads", tmp_path)
    assert result.returncode == 1
    assert "manifest.json" in result.stderr
