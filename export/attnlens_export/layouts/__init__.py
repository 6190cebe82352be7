"""A verified bundle as a model repository: the tree of directories that a model server reads.

The trees hold the bundle's own graphs and weights: copies of them, or hard links.
docs/layouts.md shows them, with what each server's documentation asks for.
"""

from attnlens_export.layouts.repository import LAYOUTS, LayoutSummary, check_output, write_layout

__all__ = ["LAYOUTS", "LayoutSummary", "check_output", "write_layout"]
