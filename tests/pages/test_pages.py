"""All code blocks of all pages run and print the documented output, except those in `exceptions.py`."""

import re
from pathlib import Path

import click
import pytest

from attnlens_cli.app import attnlens
from pages.blocks import PAGES, ROOT, Block, blocks_of
from pages.exceptions import ELSEWHERE, IN_HELP, NO_CODE, NOT_RUN
from pages.reader import FORMS, reader
from served import ServerProcess

TESTS = ROOT / "tests"


def exceptions_of(block: Block) -> list[tuple[str, str]]:
    """Return the exceptions that match a block."""
    return [
        (page, words)
        for table in (ELSEWHERE, IN_HELP, NOT_RUN, NO_CODE)
        for page, words in table
        if page == block.page and words in block.first and (table is not NO_CODE or block.form == "text")
    ]


def blocks_to_run(page: str) -> list[Block]:
    return [block for block in blocks_of(page) if not exceptions_of(block)]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_exactly_one_category(page: str) -> None:
    for block in blocks_of(page):
        entries = exceptions_of(block)
        assert len(entries) <= 1, f"{block.place}: {entries}"
        assert entries or block.form in FORMS, (
            f"{block.place}: write it as Python or as a command, or list it in tests/pages/exceptions.py"
        )


def test_every_exception_matches_a_block() -> None:
    used = {entry for page in PAGES for block in blocks_of(page) for entry in exceptions_of(block)}
    assert {*ELSEWHERE, *IN_HELP, *NOT_RUN, *NO_CODE} - used == set()


@pytest.mark.parametrize(("page", "test"), sorted({(page, test) for (page, _), test in ELSEWHERE.items()}))
def test_tests_listed_in_elsewhere_mention_the_page(page: str, test: str) -> None:
    assert re.search(rf"\b{re.escape(Path(page).name)}\b", (TESTS / test).read_text("utf-8"))


@pytest.mark.parametrize("page", sorted({page for page, _ in IN_HELP}))
def test_lines_listed_in_in_help_occur_in_a_help_text(page: str) -> None:
    for block in blocks_of(page):
        if IN_HELP.intersection(exceptions_of(block)):
            assert block.code in help_examples(block.code.split()[1]), block.place


def help_examples(name: str) -> list[str]:
    command = attnlens.get_command(click.Context(attnlens), name)
    assert command is not None
    return [line.strip() for line in (command.epilog or "").splitlines()]


@pytest.mark.extended
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_to_run(page)])
def test_page_blocks_print_the_shown_output(
    page: str, tmp_path: Path, minilm_bundle: Path, minilm_server: ServerProcess
) -> None:
    with reader(tmp_path, minilm_bundle, minilm_server) as follower:
        for block in blocks_to_run(page):
            follower.follow(block)
