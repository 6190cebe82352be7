"""Writes a model repository: verify the bundle, plan the tree, link or copy files, move it into place."""

import os
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from attnlens.bundle import MANIFEST_NAME, read_manifest, verify_files
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_export.errors import OutputError, SourceError
from attnlens_export.layouts.ovms import ovms_tree
from attnlens_export.layouts.readme import dense_file, readme
from attnlens_export.layouts.served_model import Content, ServedModel, Tree, served_models
from attnlens_export.layouts.triton import triton_tree
from attnlens_export.staging import TargetKind, check_target, staged

# The manifest under a different name, because a model repository is not a bundle. It identifies a repository.
BUNDLE_NAME = "bundle.json"
TOKENIZER_NAME = "tokenizer.json"

REPOSITORY = TargetKind(
    "model repository made by attnlens", lambda directory: read_manifest(directory, BUNDLE_NAME)
)


@dataclass(frozen=True)
class Layout:
    """Layout of a model repository.

    Attributes:
        title: Name of the server.
        tree: Function that returns the files of models.
        start: Command that starts the server on the directory `{repository}`.
    """

    title: str
    tree: Callable[[Sequence[ServedModel]], Tree]
    start: str


LAYOUTS = {
    "triton": Layout("Triton", triton_tree, "tritonserver --model-repository={repository}"),
    "ovms": Layout(
        "OpenVINO Model Server", ovms_tree, "ovms --config_path {repository}/config.json --port 9000"
    ),
}


@dataclass(frozen=True)
class LayoutSummary:
    """Summary of a written model repository.

    Attributes:
        directory: Directory of the repository.
        title: Name of the server.
        models: Names of the models.
        start: Command that starts the server.
        num_linked: Number of hard links to files of the bundle.
        num_copied: Number of copies of files of the bundle.
        num_written: Number of new files.
    """

    directory: Path
    title: str
    models: tuple[str, ...]
    start: str
    num_linked: int
    num_copied: int
    num_written: int


def write_layout(
    bundle: Path, layout: str, output: Path, *, force: bool = False, link: bool = False
) -> LayoutSummary:
    """Write a bundle as a model repository.

    Args:
        bundle: Directory of the bundle. All hashes are verified first.
        layout: Key of `LAYOUTS`.
        output: Directory to create.
        force: Whether to replace an existing model repository.
        link: Whether to create hard links instead of copies where possible. The Python package onnx then
            rejects graphs of the bundle, because their weights have several links.

    Raises:
        BundleError: The bundle is missing or was altered.
        SourceError: The bundle failed parity, its pooling is unknown, or its graphs do not fit the layout.
        OutputError: `output` cannot be written or replaced.
    """
    check_output(bundle, output, force=force)
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    if not manifest.parity.passed:
        raise SourceError(f"{bundle} failed parity, so it must not be served: see {bundle}/parity/report.md")
    if not manifest.pooling.pooling:
        raise SourceError(
            f"{bundle / MANIFEST_NAME}: the pooling is missing or unknown: use the version of attnlens that "
            "exported the bundle"
        )
    kind = LAYOUTS[layout]
    models = served_models(bundle, manifest)
    start = kind.start.format(repository="$PWD")
    tree = kind.tree(models) | _about(bundle, manifest, models, start, is_linked=link)
    with staged(output, force=force, kind=REPOSITORY) as staging:
        made = Counter(_place(content, staging / path, link=link) for path, content in tree.items())
    return LayoutSummary(
        output,
        kind.title,
        tuple(model.name for model in models),
        kind.start.format(repository=shlex.quote(str(output.absolute()))),
        num_linked=made["linked"],
        num_copied=made["copied"],
        num_written=made["written"],
    )


def check_output(bundle: Path, output: Path, *, force: bool) -> None:
    """Check that a model repository of `bundle` can be written to a directory.

    Raises:
        OutputError: The directory overlaps with the bundle, or exists and must not be replaced.
    """
    inner, outer = Path(os.path.realpath(output)), Path(os.path.realpath(bundle))
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise OutputError(f"{output} and the bundle {bundle} overlap: choose a directory next to the bundle")
    check_target(output, force=force, kind=REPOSITORY)


def _about(
    bundle: Path, manifest: Manifest, models: Sequence[ServedModel], start: str, *, is_linked: bool
) -> Tree:
    """Return the files for authors of clients. Both servers read only directories and config.json."""
    has_tokenizer = any(file.path == TOKENIZER_NAME for file in manifest.files)
    page = readme(manifest, models, start, TOKENIZER_NAME if has_tokenizer else None, is_linked=is_linked)
    about: Tree = {"README.md": page.encode(), BUNDLE_NAME: bundle / MANIFEST_NAME}
    for layer in manifest.pooling.dense:
        about[dense_file(layer)] = bundle / layer.path / "model.safetensors"
    return about | ({TOKENIZER_NAME: bundle / TOKENIZER_NAME} if has_tokenizer else {})


def _place(content: Content, path: Path, *, link: bool) -> str:
    """Create a file and return "linked", "copied" or "written"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
        return "written"
    # Resolve symbolic links: a hard link to a relative symbolic link would be broken.
    source = os.path.realpath(content)
    if link:
        # Fails across file systems, without support for hard links, or for files of other users.
        with suppress(OSError):
            os.link(source, path)
            return "linked"
    shutil.copyfile(source, path)
    return "copied"
