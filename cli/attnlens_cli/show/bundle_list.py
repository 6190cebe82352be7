"""The bundles of a directory: their manifests, and a table of at least 60 columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from attnlens.bundle import MANIFEST_NAME, BundleError, find_graph, read_manifest, verify_files
from attnlens.v1.manifest_pb2 import GraphPurpose, Manifest, Precision
from attnlens_cli.printable import counted, printable, source_text
from attnlens_cli.show.console import make_console

_FP32_BYTES = 4
_COMMIT_LENGTH, _DATE_LENGTH = 10, 10


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a bundle according to its manifest.

    Attributes:
        model: Name of the model.
        num_parameters: Approximate number, from the size of the weight files.
        num_labels: Number of labels of a classifier, 1 for a reranker, 0 for an embedding model.
        precisions: Precisions of the graphs, such as `fp32` and `int8`.
        size_bytes: Size of all files in the manifest.
        passed: Whether the bundle passed parity. Servers reject bundles that did not.
        source: Origin of the weights: hub id, directory name, or `config+seed:N`.
        source_revision: Commit on the hub. Empty if unknown.
        attnlens: Version of the exporter. Empty if unknown.
    """

    model: str
    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_parameters: int
    max_tokens: int
    num_labels: int
    precisions: tuple[str, ...]
    size_bytes: int
    passed: bool
    source: str
    source_revision: str
    attnlens: str


@dataclass(frozen=True, slots=True)
class ListedBundle:
    """A directory with a manifest.

    Attributes:
        directory: Path of the bundle.
        exported_at: Modification time of the manifest, ISO 8601 in UTC.
        problem: Why the bundle is unusable. Empty if no problem was found.
        facts: None if the manifest cannot be read.
    """

    directory: Path
    exported_at: str
    problem: str
    facts: Facts | None


def list_directory(directory: Path, *, verify: bool) -> Iterator[ListedBundle]:
    """Yield the bundles directly below a directory by name, or the directory itself if it is a bundle.

    Args:
        directory: Directory to search.
        verify: Whether to verify the hash of every file, at one to two GB per second. Otherwise only sizes
            are compared.
    """
    if (directory / MANIFEST_NAME).exists():
        yield _listed(directory, verify=verify)
        return
    for path in sorted(directory.iterdir()):
        if not path.name.startswith(".") and (path / MANIFEST_NAME).exists():
            yield _listed(path, verify=verify)


def _listed(directory: Path, *, verify: bool) -> ListedBundle:
    modified = (directory / MANIFEST_NAME).stat().st_mtime
    exported_at = datetime.fromtimestamp(modified, UTC).isoformat(timespec="seconds")
    facts = None
    try:
        manifest = read_manifest(directory)
        facts = _facts(manifest)
        verify_files(directory, manifest, check_hashes=verify)
    except (BundleError, OSError) as error:
        return ListedBundle(directory, exported_at, str(error), facts)
    problem = "" if facts.passed else f"it failed parity, see {directory / 'parity' / 'report.md'}"
    return ListedBundle(directory, exported_at, problem, facts)


def _facts(manifest: Manifest) -> Facts:
    sizes = manifest.architecture
    bytes_of = {file.path: file.size_bytes for file in manifest.files}
    graph = find_graph(manifest, GraphPurpose.GRAPH_PURPOSE_EMBEDDINGS)
    weights = sum(bytes_of.get(path, 0) for path in (graph.path, *graph.data_files))
    names = Precision.DESCRIPTOR.values_by_number
    precisions = [
        names[graph.precision].name.removeprefix("PRECISION_").lower()
        for graph in manifest.graphs
        if graph.precision in names
    ]
    return Facts(
        model=manifest.model_name,
        family=sizes.family,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_parameters=weights // _FP32_BYTES,
        max_tokens=manifest.max_tokens,
        num_labels=len(manifest.classifier.labels),
        precisions=tuple(dict.fromkeys(precisions)),
        size_bytes=sum(bytes_of.values()),
        passed=manifest.parity.passed,
        source=manifest.source,
        source_revision=manifest.source_revision,
        attnlens=manifest.tool_versions.get("attnlens", ""),
    )


def print_bundles(directory: Path, bundles: Sequence[ListedBundle]) -> None:
    """Print the bundles of a directory as a table."""
    console = make_console()
    is_alone = [bundle.directory for bundle in bundles] == [directory]
    console.print(printable(str(directory.parent if is_alone else directory)), style="bold", soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, leading=1)
    for name in ("bundle", "encoder", "files", "verdict"):
        table.add_column(name, overflow="fold")
    for bundle in bundles:
        table.add_row(*_cells(bundle))
    console.print(table)
    console.print()


def _cells(bundle: ListedBundle) -> list[str | Text]:
    facts, lines = bundle.facts, [bundle.directory.name]
    verdict = Text("broken" if bundle.problem else "verified", "bold red" if bundle.problem else "green")
    if bundle.problem:
        verdict.append(f": {printable(bundle.problem)}", "default")
    if facts is None:
        return [printable(lines[0]), "", "", verdict]
    if facts.model != bundle.directory.name:
        lines.append(facts.model)
    if facts.num_labels:
        lines.append("reranker" if facts.num_labels == 1 else f"classifier, {facts.num_labels:,} labels")
    lines.append(f"from {source_text(facts.source, facts.source_revision[:_COMMIT_LENGTH])}")
    exported = [f"attnlens {facts.attnlens}"] if facts.attnlens else []
    verdict.append("".join(f"\n{line}" for line in (*exported, bundle.exported_at[:_DATE_LENGTH])), "default")
    files = f"{facts.size_bytes / 1e6:,.1f} MB\n{', '.join(facts.precisions)}"
    return ["\n".join(map(printable, lines)), _encoder(facts), files, verdict]


def _encoder(facts: Facts) -> str:
    layers, heads = counted(facts.num_layers, "layer"), counted(facts.num_heads, "head")
    lines = (
        f"{printable(facts.family)}, {facts.hidden_size:,} wide",
        f"{layers}, {heads}",
        f"{_rounded(facts.num_parameters)} parameters",
        f"{facts.max_tokens:,} tokens",
    )
    return "\n".join(lines)


def _rounded(number: int) -> str:
    """Return two digits and a unit, such as `23 M`."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            share = number / size
            return f"{share:.1f} {unit}" if share < 10 else f"{share:.0f} {unit}"  # noqa: PLR2004 - two digits
    return str(number)
