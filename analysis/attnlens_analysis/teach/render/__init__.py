"""Renders lessons as terminal text, Markdown or HTML with charts."""

from attnlens_analysis.teach.render.html import as_html, picture
from attnlens_analysis.teach.render.markdown import as_markdown
from attnlens_analysis.teach.render.text import as_text, step_lines

__all__ = ["as_html", "as_markdown", "as_text", "picture", "step_lines"]
