"""The documentation site that `make docs-site` builds: complete and readable offline."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import attnlens_client
import attnlens_server
from attnlens.v1 import encoder_service_pb2 as pb

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site like `make docs-site`, failing on warnings such as broken links."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    return folder


def test_site_and_its_navigation_contain_every_page(site: Path) -> None:
    home = (site / "index.html").read_text("utf-8")
    pages = [path.relative_to(ROOT) for path in ROOT.glob("docs/*.md") if path.name != "README.md"]
    for page in [*pages, Path("docs/index"), Path("CONTRIBUTING"), Path("CHANGELOG"), Path("bench/index")]:
        html = page.with_suffix(".html")
        assert (site / html).is_file()
        assert f'href="{html}"' in home, html


def test_reference_covers_all_public_names_and_method_arguments(site: Path) -> None:
    for package in (attnlens_client, attnlens_server):
        name = package.__name__
        page = (site / "docs" / "reference" / f"{name}.html").read_text("utf-8")
        assert {public for public in package.__all__ if f'id="{name}.{public}"' not in page} == set()
    page = (site / "docs" / "reference" / "attnlens_client.html").read_text("utf-8")
    _, _, embed = page.partition('id="attnlens_client.Client.embed"')
    signature = re.sub(r"<[^>]+>", "", embed.partition("</pre>")[0])
    assert "dimensions" in signature
    assert "plan" not in signature


def test_reference_covers_all_protocol_messages(site: Path) -> None:
    page = (site / "docs" / "reference" / "protocol.html").read_text("utf-8")
    messages = list(pb.DESCRIPTOR.message_types_by_name)
    assert {name for name in messages if f'<h3 id="{name.lower()}">' not in page} == set()
    assert "<code>char_start</code>" in page


def test_page_opens_from_disk_and_can_be_searched_offline(browser: "Browser", site: Path) -> None:
    context = browser.new_context()
    tab = context.new_page()
    requests: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto((site / "docs" / "protocol.html").as_uri())
    tab.keyboard.press("/")
    tab.keyboard.type("rollout")
    tab.wait_for_selector(".md-search-result__item")
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert tab.locator(".md-search-result__item").count() > 3
    context.close()


def test_no_page_loads_external_resources(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        tags = re.findall(r"<(?:script|img|link)\b[^>]*>", page.read_text("utf-8"))
        loaded = re.findall(r'\b(?:src|href)="([^"]*)"', "".join(tags))
        assert loaded
        assert [url for url in loaded if re.match(r"(https?:)?//", url)] == [], page
