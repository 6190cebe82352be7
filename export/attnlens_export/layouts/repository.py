"""Writing a model repository: verify the bundle, plan the tree, link or copy, move into place."""

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

# The bundle's manifest under another name: what is written here is no bundle, and is known by this file.
BUNDLE_NAME = "bundle.json"
TOKENIZER_NAME = "tokenizer.json"

REPOSITORY = TargetKind(
    "model repository made by attnlens", lambda directory: read_manifest(directory, BUNDLE_NAME)
)


@dataclass(frozen=True)
class Layout:
    """A kind of model repository.

    Attributes:
        title: the server.
        tree: the files of the models.
        start: the command that starts the server on the directory `{repository}`.
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
    """A model repository that was written.

    Attributes:
        directory: where it is.
        title: the server that it is for.
        models: the names of its models.
        start: the command that starts the server.
        num_linked: how many files are hard links to the bundle's.
        num_copied: how many are copies.
        num_written: how many are new.
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
        bundle: the bundle; every hash is checked first.
        layout: a key of `LAYOUTS`.
        output: the directory to make.
        force: whether a model repository that is in the way is replaced.
        link: whether files are hard links to the bundle's, where that is possible, instead of copies.
            Python's onnx then refuses graphs of the bundle whose weights have several links.

    Raises:
        BundleError: there is no bundle, or it was altered.
        SourceError: it failed parity, its pooling is unknown, or its graphs can't be laid out.
        OutputError: `output` can't be written, or may not be replaced.
    """
    check_output(bundle, output, force=force)
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    if not manifest.parity.passed:
        raise SourceError(f"{bundle} failed parity: no server should offer it; see {bundle}/parity/report.md")
    if not manifest.pooling.pooling:
        raise SourceError(
            f"{bundle / MANIFEST_NAME} states no pooling that this version knows: install the version of "
            "attnlens that wrote it"
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
    """Refuse a directory that can't become a model repository of `bundle`.

    Raises:
        OutputError: it is the bundle, inside it or around it, or it exists and may not be replaced.
    """
    inner, outer = Path(os.path.realpath(output)), Path(os.path.realpath(bundle))
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise OutputError(f"{output} and the bundle {bundle} overlap: choose a directory beside the bundle")
    check_target(output, force=force, kind=REPOSITORY)


def _about(
    bundle: Path, manifest: Manifest, models: Sequence[ServedModel], start: str, *, is_linked: bool
) -> Tree:
    """Return the files for those who write clients. Both servers look at directories and config.json only."""
    has_tokenizer = any(file.path == TOKENIZER_NAME for file in manifest.files)
    page = readme(manifest, models, start, TOKENIZER_NAME if has_tokenizer else None, is_linked=is_linked)
    about: Tree = {"README.md": page.encode(), BUNDLE_NAME: bundle / MANIFEST_NAME}
    for layer in manifest.pooling.dense:
        about[dense_file(layer)] = bundle / layer.path / "model.safetensors"
    return about | ({TOKENIZER_NAME: bundle / TOKENIZER_NAME} if has_tokenizer else {})


def _place(content: Content, path: Path, *, link: bool) -> str:
    """Make one file and tell how: "linked", "copied" or "written"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
        return "written"
    # What a link leads to: a hard link to a link would lead nowhere elsewhere.
    source = os.path.realpath(content)
    if link:
        # Not possible: another file system, one without hard links, or a file of another user.
        with suppress(OSError):
            os.link(source, path)
            return "linked"
    shutil.copyfile(source, path)
    return "copied"
