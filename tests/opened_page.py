"""A viewer page in a browser, with queries for tests."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

COMMANDS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
AXE = Path(__file__).parents[1] / "viewer" / "node_modules" / "axe-core" / "axe.min.js"

PIXELS = """(selector) => {
  const canvas = document.querySelector(selector);
  const { width, height } = canvas;
  const copy = Object.assign(document.createElement("canvas"), { width, height });
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const image = context.getImageData(0, 0, copy.width, copy.height);
  return { width: image.width, height: image.height, bytes: [...image.data] };
}"""


@contextmanager
def launched_browser() -> "Iterator[Browser]":
    """Launch a headless Chromium. Its event loop runs until the end, so no asyncio tests can run before."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - takes a moment

    executables = [path for command in COMMANDS if (path := shutil.which(command))]
    if not executables:
        pytest.fail(f"Chromium not found ({', '.join(COMMANDS)}). Run viewer/install_for_tests.sh chromium.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executables[0], args=FLAGS)
        yield browser
        browser.close()


class OpenedPage:
    """A browser tab with a file or URL. `problems` lists script errors and console messages."""

    def __init__(
        self,
        browser: "Browser",
        location: Path | str,
        *,
        width: int = 1200,
        ready: str = "document.querySelector('.attnlens')?.dataset.ready === 'true'",
        **settings: Any,
    ) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **settings)
        self.requests: list[str] = []
        self.problems: list[str] = []
        self.tab = self.context.new_page()
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.on("pageerror", lambda error: self.problems.append(str(error)))
        self.tab.on("console", lambda message: self.problems.append(message.text))
        self.tab.goto(location if isinstance(location, str) else location.as_uri())
        self.wait(ready)

    def close(self) -> None:
        self.context.close()

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true.

        `wait_for_function` requires eval, which the page blocks.
        """
        self.tab.evaluate(
            f"async () => {{ while (!({condition})) await new Promise((go) => requestAnimationFrame(go)); }}"
        )

    def pixels(self, selector: str) -> npt.NDArray[np.uint8]:
        """Return the colors of a canvas, (rows, columns, 3)."""
        image = self.tab.evaluate(PIXELS, selector)
        pixels = np.array(image["bytes"], dtype=np.uint8)
        return pixels.reshape(image["height"], image["width"], 4)[..., :3]

    def text(self, selector: str) -> str:
        """Return the text of the first matching element, with normalized whitespace."""
        return " ".join(self.tab.locator(selector).first.inner_text().split())

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all matching elements."""
        return [" ".join(text.split()) for text in self.tab.locator(selector).all_inner_texts()]

    def press(self, name: str) -> None:
        """Click the first button with this name."""
        self.tab.get_by_role("button", name=name, exact=True).first.click()

    def choose_head(self, layer: int, head: int) -> None:
        """Click the thumbnail of a head and wait until its map is drawn."""
        self.tab.locator(f'.head[aria-label^="Layer {layer}, head {head}"]').first.click()
        self.wait(f"document.querySelector('[data-drawn$=\" {layer} {head}\"]')")

    def violations(self) -> list[str]:
        """Return the accessibility violations that axe-core finds."""
        if not AXE.exists():
            raise FileNotFoundError("axe-core is not installed. Run `npm ci` in viewer/, or `make test`.")
        self.tab.evaluate(AXE.read_text(encoding="utf-8"))
        # In the middle of a transition, a text has neither its old colours nor its new ones.
        self.tab.evaluate("() => Promise.all(document.getAnimations().map((each) => each.finished))")
        report = self.tab.evaluate("() => axe.run(document)")
        return [
            f"{rule['id']}: {node['html'][:120]}: {node['failureSummary']}"
            for rule in report["violations"]
            for node in rule["nodes"]
        ]

    def mark_ms(self) -> float:
        """Return the time from navigation to the first drawing, in milliseconds."""
        return float(self.tab.evaluate("performance.getEntriesByName('attnlens-first')[0].startTime"))


Open: TypeAlias = Callable[..., OpenedPage]
