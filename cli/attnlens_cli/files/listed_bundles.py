"""The bundles of a directory, as their manifests describe them. A bundle that is broken says why."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from attnlens.bundle import MANIFEST_NAME, BundleError, find_graph, read_manifest, verify_files
from attnlens.v1.manifest_pb2 import GraphPurpose, Manifest, Precision

_FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Facts:
    """What a manifest says of a bundle.

    Attributes:
        model: Name of the model.
        num_parameters: about as many, from the size of the files with the weights.
        precisions: in which it has graphs, such as `fp32` and `int8`.
        size_bytes: of all files that it lists.
        passed: whether the graphs compute what PyTorch computes; else a server refuses the bundle.
        source: where the weights came from: a hub id, a directory's name, or `config+seed:N`.
        source_revision: the commit on the hub; empty: not known.
        attnlens: the version that exported it; empty: not stated.
    """

    model: str
    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_parameters: int
    max_tokens: int
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
        directory: where it is.
        exported_at: ISO 8601 in UTC: when its manifest was written.
        problem: why it can't be used; empty: nothing was found.
        facts: None where the manifest can't be read.
    """

    directory: Path
    exported_at: str
    problem: str
    facts: Facts | None


def list_directory(directory: Path, *, verify: bool) -> Iterator[ListedBundle]:
    """Yield the bundles right below a directory, or the one that it is itself, by name.

    Args:
        directory: where to look.
        verify: compare the hash of every file, which takes a second for a gigabyte or two. Else only their
            sizes are compared.
    """
    if (directory / MANIFEST_NAME).exists():
        yield _listed(directory, verify=verify)
        return
    for path in sorted(directory.iterdir()):
        if not path.name.startswith(".") and (path / MANIFEST_NAME).exists():
            yield _listed(path, verify=verify)


def _listed(directory: Path, *, verify: bool) -> ListedBundle:
    written = (directory / MANIFEST_NAME).stat().st_mtime
    exported_at = datetime.fromtimestamp(written, UTC).isoformat(timespec="seconds")
    facts = None
    try:
        manifest = read_manifest(directory)
        facts = _facts(manifest)
        if verify:
            verify_files(directory, manifest)
        else:
            _check_sizes(directory, manifest)
    except (BundleError, OSError) as error:
        return ListedBundle(directory, exported_at, str(error), facts)
    problem = "" if facts.passed else f"it failed parity, see {directory / 'parity' / 'report.md'}"
    return ListedBundle(directory, exported_at, problem, facts)


def _check_sizes(directory: Path, manifest: Manifest) -> None:
    for file in manifest.files:
        path = directory / file.path
        if not path.is_file():
            raise BundleError(f"{path} is missing: copy the whole bundle, or export it again")
        if path.stat().st_size != file.size_bytes:
            raise BundleError(
                f"{path} was altered: it has {path.stat().st_size} bytes, the manifest says {file.size_bytes}"
            )


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
        precisions=tuple(dict.fromkeys(precisions)),
        size_bytes=sum(bytes_of.values()),
        passed=manifest.parity.passed,
        source=manifest.source,
        source_revision=manifest.source_revision,
        attnlens=manifest.tool_versions.get("attnlens", ""),
    )
