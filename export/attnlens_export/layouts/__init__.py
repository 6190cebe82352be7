"""Export of a bundle to the model repository of another model server.

A repository contains copies of, or hard links to, the graphs and weights of the bundle. See docs/layouts.md.
"""

from attnlens_export.layouts.repository import LAYOUTS, LayoutSummary, check_output, write_layout

__all__ = ["LAYOUTS", "LayoutSummary", "check_output", "write_layout"]
