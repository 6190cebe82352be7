"""Template of a static HTML page without scripts or external resources."""

from html import escape

_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
pre { background: #f4f4f4; padding: .5rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere }
figure, .wide { margin: 1rem 0; overflow-x: auto }
figure:not(.grid) svg { max-width: 100%; height: auto }
figure.diagram svg { min-width: 40rem }
table { border-collapse: collapse } td, th { padding: .1rem .6rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
.note { border-left: 4px solid #D55E00; padding-left: .6rem } .try { border-left: 4px solid #009E73; padding-left: .6rem }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #171717 } pre { background: #262626 } td, th { border-color: #444 }
  figure svg { filter: invert(.91) hue-rotate(180deg) }
}
"""  # noqa: E501 - rules of CSS
# Elements that scroll on a narrow screen, which a keyboard must reach.
_WIDE = {
    "<table>": "<div class='wide' role='group' aria-label='Table' tabindex='0'><table>",
    "</table>": "</table></div>",
    "<figure": "<figure tabindex='0'",
}


def as_page(title: str, body: str) -> str:
    """Return an HTML page. `body` is HTML, `title` is plain text."""
    for start, replacement in _WIDE.items():
        body = body.replace(start, replacement)
    return (
        "<!DOCTYPE html>\n<html xmlns='http://www.w3.org/1999/xhtml' lang='en'><head><meta charset='utf-8'/>"
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src "
        "'unsafe-inline'\"/>"
        "<meta name='viewport' content='width=device-width'/>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1>\n{body}\n</main></body></html>\n"
    )
