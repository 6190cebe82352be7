"""The HTML file is self-contained: it opens from disk, makes no requests and runs only its own script."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from attnlens_viewer import Page, ViewedText, ViewedToken, html_of
from attnlens_viewer.encoding import square_root_bytes
from opened_page import Open
from references import Reference
from viewer_pages import full_page, plain_page, text_of

PASSAGES = Path(__file__).parents[1] / "data" / "passages.jsonl"

HOSTILE = (
    "[CLS]",
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "&lt;b&gt;",
    "]]>\u2028\u2029\u0000\u200b",
    "שלום",
    "مرحبا",
    "🙂",
    "x" * 10_000,
    "[SEP]",
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("make", [plain_page, full_page])
def test_page_loads_without_further_requests_or_errors(
    open_page: Open, make: Callable[[], Page], scheme: str
) -> None:
    page = open_page(make(), color_scheme=scheme)
    page.wait("document.querySelector('.heads').dataset.painted === '3'")
    assert len(page.requests) == 1
    assert page.requests[0].startswith("file://")
    assert page.problems == []


def test_network_access_is_blocked(open_page: Open) -> None:
    page = open_page(plain_page())
    blocked = page.tab.evaluate(
        "async () => { try { await fetch('https://example.org/'); return false } catch { return true } }"
    )
    assert blocked
    assert any("Content Security Policy" in problem for problem in page.problems)
    page.problems.clear()


def test_injected_scripts_do_not_run(open_page: Open) -> None:
    page = open_page(plain_page())
    page.tab.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.intruder = true";
          document.body.append(script);
          const button = document.createElement("div");
          button.innerHTML = "<button onclick='window.intruder = true'></button>";
          document.body.append(button);
          button.firstChild.click();
        }"""
    )
    assert page.tab.evaluate("window.intruder") is None
    assert len(page.requests) == 1
    assert page.problems
    page.problems.clear()


def test_hostile_text_is_displayed_as_text(open_page: Open) -> None:
    text = text_of(HOSTILE)
    page = open_page(Page(title=HOSTILE[1], model=HOSTILE[1], texts=[text], notes=[HOSTILE[1]]))
    page.press("Tokens")
    shown = page.tab.locator(".text .chip").all_text_contents()
    assert shown[1] == HOSTILE[1]
    assert shown[5:8] == ["שלום", "مرحبا", "🙂"]
    assert len(shown[8]) == 80
    assert page.tab.locator("img").count() == 0
    assert page.tab.title() == HOSTILE[1]
    assert page.text("h1") == HOSTILE[1]
    width = page.tab.evaluate("document.documentElement.scrollWidth")
    assert width <= 1200
    for index in range(len(HOSTILE)):
        page.tab.locator(".text .chip").nth(index).click()


def test_right_to_left_text_is_laid_out_from_right_to_left(open_page: Open) -> None:
    text = text_of(("[CLS]", "שלום", "עולם", "[SEP]"))
    page = open_page(Page(title="שלום", model="small", texts=[text]))
    chips = page.tab.locator(".text .chip")
    assert page.tab.locator(".text .chips").get_attribute("dir") == "rtl"
    chips.nth(1).click()
    page.tab.keyboard.press("ArrowLeft")
    assert chips.nth(2).get_attribute("aria-selected") == "true"


def test_document_has_one_executable_script_and_references_no_files() -> None:
    document = html_of(full_page())
    scripts = re.findall(r"<script([^>]*)>", document)
    assert [kind for kind in scripts if "type=" not in kind] == [""]
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:|//|\w+\.(js|css))""", document)
    assert "default-src 'none'" in document
    assert "unsafe" not in document.split("</head>")[0].split("<style>")[0]


@pytest.mark.parametrize("width", [360, 1200])
def test_page_does_not_overflow_horizontally(open_page: Open, width: int) -> None:
    page = open_page(full_page(), width=width)
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [390, 1280])
def test_long_text_opens_at_the_top_with_a_visible_token_selected(open_page: Open, width: int) -> None:
    page = open_page(
        Page(title="Long", model="small", texts=[text_of([f"word{n}" for n in range(500)])]), width=width
    )
    for view in (".text .chips", ".lines-scroll"):
        sizes = "[box.scrollTop, box.scrollHeight > box.clientHeight]"
        assert page.tab.evaluate(f"(([box]) => {sizes})(document.querySelectorAll('{view}'))") == [0, True]
    chosen = page.tab.locator(".text .chip[aria-selected='true']")
    assert int(chosen.get_attribute("data-index") or "") < 16


def test_page_does_not_overflow_after_rotating_a_phone(open_page: Open) -> None:
    page = open_page(full_page(), width=800)
    page.tab.set_viewport_size({"width": 390, "height": 844})
    page.wait("document.querySelector('.lines').clientWidth < 390")
    assert page.tab.evaluate("document.documentElement.scrollWidth") == 390


@pytest.fixture(scope="module")
def long_text(reference: Reference, minilm_bundle: Path) -> Callable[[int], ViewedText]:
    """Return the first T tokens of a text with real attention maps, (6, 12, T, T)."""
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm_bundle / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    lines = PASSAGES.read_text(encoding="utf-8").splitlines()
    longest = " ".join(sorted((json.loads(line)["text"] for line in lines), key=len)[-8:])
    offsets = tokenizer.encode(longest).offsets

    def first(num_tokens: int) -> ViewedText:
        text = longest[: offsets[num_tokens - 2][1]]
        encoding = tokenizer.encode(text)
        assert len(encoding.ids) == num_tokens
        maps = np.stack([array for name, array in reference(text).items() if name.startswith("attentions.")])
        tokens = [
            ViewedToken(spelling, text[start:end] or spelling, index, is_special=start == end)
            for index, (spelling, (start, end)) in enumerate(
                zip(encoding.tokens, encoding.offsets, strict=True)
            )
        ]
        return ViewedText(label="Text", tokens=tokens, maps=maps)

    return first


def test_long_text_makes_a_small_file_and_can_switch_heads(
    open_file: Open, long_text: Callable[[int], ViewedText], tmp_path: Path
) -> None:
    path = tmp_path / "long.html"
    path.write_text(html_of(Page(title="Long", model="MiniLM", texts=[long_text(256)])), encoding="utf-8")
    assert path.stat().st_size <= 4e6
    page = open_file(path)
    assert page.mark_ms() > 0
    page.wait("document.querySelector('.heads').dataset.painted === '6'")
    page.choose_head(5, 11)
    assert page.text(".text .sum").endswith("layer 5, head 11.")
    assert len(page.requests) == 1


def test_longest_text_of_a_large_model_opens(
    open_file: Open, long_text: Callable[[int], ViewedText], tmp_path: Path
) -> None:
    text = long_text(512)
    heads = square_root_bytes(np.asarray(text.maps)).reshape(72, 512, 512)
    maps = np.resize(heads, (24, 16, 512, 512))  # repeats the maps
    large = ViewedText(label="Text", tokens=text.tokens, maps=maps)
    path = tmp_path / "large.html"
    path.write_text(html_of(Page(title="Large", model="large", texts=[large])), encoding="utf-8")
    assert 50e6 < path.stat().st_size <= 70e6
    page = open_file(path)
    assert "largest weights" not in page.text(".facts")
    page.choose_head(23, 15)
    assert page.tab.locator(".head").count() == 24 * 16
    assert len(page.requests) == 1


def test_page_over_the_limit_keeps_only_the_largest_weights(open_file: Open, tmp_path: Path) -> None:
    spellings = [f"t{number}" for number in range(200)]
    page = Page(title="Over", model="small", texts=[text_of(spellings)])
    whole = html_of(page)
    limit = len(whole) // 2
    path = tmp_path / "over.html"
    path.write_text(html_of(page, max_bytes=limit), encoding="utf-8")
    opened = open_file(path)
    assert "the 32 largest weights of each row" in opened.text(".facts")
    assert "exceed the size limit of a page" in opened.text(".notes")
    with pytest.raises(ValueError, match="exceeds 1,000 bytes even with only the 32 largest weights"):
        html_of(page, max_bytes=1000)
