"""How a model repository for another server is shown."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnlens_export.layouts import LayoutSummary


def describe_layout(summary: "LayoutSummary", *, link: bool) -> str:
    """Say what was made, whether as links, and how to start the server."""
    placed = []
    if summary.num_linked:
        placed.append(
            f"{summary.num_linked} files linked (Python's onnx refuses weights with hard links, those of the "
            "bundle too)"
        )
    if summary.num_copied:
        placed.append(
            f"{summary.num_copied} files copied" + (" (hard links are not possible there)" if link else "")
        )
    placed.append(f"{summary.num_written} written")
    return (
        f"{summary.directory}: {', '.join(summary.models)} for {summary.title}, {', '.join(placed)}\n"
        f"start it with: {summary.start}"
    )
