"""The pages of docs/: all of them are in the index, no link leads nowhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "bench" / "README.md"])
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
LINK_TO_A_HEADING = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]*)\)")


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    listed = {(ROOT / "docs" / link).resolve() for link in LINK.findall(index)}
    assert set(ROOT.glob("docs/*.md")) - listed == {ROOT / "docs" / "README.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text("utf-8")) if not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_headings_lead_to_one(page: Path) -> None:
    links = LINK_TO_A_HEADING.findall(page.read_text("utf-8"))
    missing = [
        f"{target}#{anchor}"
        for target, anchor in links
        if anchor not in anchors(page.parent / target if target else page)
    ]
    assert missing == []


def anchors(page: Path) -> list[str]:
    """What forges call the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles]
