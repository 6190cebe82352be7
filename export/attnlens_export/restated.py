"""Comparison of what a manifest states with values that are read from the checkpoint or measured again.

`claims` compares the fields that follow from the files of a bundle. Each function here yields a line per
field that differs, with both values.

Shapes: E embedding size.
"""

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnlens.tensors import from_tensor
from attnlens.v1.explanation_pb2 import ExplainMethod, Faithfulness
from attnlens.v1.manifest_pb2 import EmbeddingRanges, Manifest, PublisherComparison
from attnlens_export.embedding_ranges import measure_ranges
from attnlens_export.faithfulness.measure import FaithfulnessResult, read_recorded_texts
from attnlens_export.judge.result import PublisherResult
from attnlens_export.parity.reference import TOLERANCE
from attnlens_export.progress import StageProgress
from attnlens_export.published.side_files import read_license, read_max_tokens
from attnlens_model import EncoderConfig, StagedCheckpoint

_RANGE_SHARE = 1e-3
"""Error of a range, relative to its width: a quarter of the step of 8-bit embeddings."""
_MAX_CORRELATION_ERROR = 0.01
"""Error of a rank correlation: rounding errors swap few tokens of almost the same effect."""


@dataclass(frozen=True)
class Published:
    """Manifest fields that a checkpoint determines.

    Attributes:
        max_tokens: Maximum input length in tokens.
        weights_license: License of the weights. Empty if it is not stated.
        source_revision: Commit on the hub. Empty if unknown.
    """

    max_tokens: int
    weights_license: str
    source_revision: str

    @classmethod
    def read(cls, checkpoint: StagedCheckpoint, config: EncoderConfig) -> "Published":
        """Read the files of a checkpoint whose encoder has the configuration `config`."""
        directory = checkpoint.directory
        return cls(read_max_tokens(directory, config), read_license(directory), checkpoint.commit)

    def compare(self, manifest: Manifest) -> Iterator[str]:
        """Yield a line per field that differs."""
        for name in ("max_tokens", "weights_license"):
            stated, found = getattr(manifest, name), getattr(self, name)
            if stated != found:
                yield f"{name} is {stated!r}, but {found!r} according to the checkpoint"


def compare_source(
    directory: Path,
    manifest: Manifest,
    config: EncoderConfig,
    published: Published | None,
    progress: StageProgress,
) -> Iterator[str]:
    """Yield a line per field that differs from the checkpoint, or from embedding ranges measured again.

    Args:
        directory: Bundle directory.
        manifest: Its manifest.
        config: Configuration of its encoder.
        published: Fields that the checkpoint determines. None for a module.
        progress: Called before each step.
    """
    if published:
        yield from published.compare(manifest)
    if manifest.HasField("embedding_ranges"):
        yield from compare_ranges(directory, manifest.embedding_ranges, config, progress)


def compare_ranges(
    directory: Path, stated: EmbeddingRanges, config: EncoderConfig, progress: StageProgress
) -> Iterator[str]:
    """Measure the embedding ranges of a bundle again, and yield a line if they differ."""
    found = measure_ranges(directory, config, progress) or EmbeddingRanges()
    if found.num_texts != stated.num_texts:
        yield f"embedding_ranges.num_texts is {stated.num_texts}, but {found.num_texts} texts were measured"
        return
    before, now = from_tensor(stated.values), from_tensor(found.values)  # (2, E)
    if before.shape != now.shape:
        yield f"embedding_ranges.values has the shape {before.shape}, but {now.shape} as measured"
        return
    excess = np.abs(before - now) - np.maximum(TOLERANCE, _RANGE_SHARE * (now[1] - now[0]))
    bound, component = np.unravel_index(int(np.nan_to_num(excess, nan=np.inf).argmax()), excess.shape)
    if not excess[bound, component] <= 0:
        stated_value, measured = before[bound, component], now[bound, component]
        yield (
            f"embedding_ranges.values: the {('minimum', 'maximum')[int(bound)]} of component {component} is "
            f"{stated_value:.6g}, but {measured:.6g} as measured"
        )


def compare_pipeline(stated: PublisherComparison, found: PublisherResult) -> Iterator[str]:
    """Yield a line per field of an earlier comparison with the publisher's pipeline that differs."""
    if not stated.library or not found.library or found.failures():  # these are reported
        return
    for name in ("library", "longest_tokens"):
        before, now = getattr(stated, name), getattr(found, name)
        if before != now:
            yield f"publisher.{name} is {before!r}, but {now!r} was compared now"


def compare_faithfulness(directory: Path, manifest: Manifest, found: FaithfulnessResult) -> Iterator[str]:
    """Yield a line per stated rank correlation that differs from one measured again on the same texts."""
    if read_recorded_texts(directory) != (found.texts, found.num_texts):
        return
    measured = {_name(entry): entry.rank_correlation for entry in found.to_messages()}
    for entry in manifest.faithfulness:
        name, stated = _name(entry), entry.rank_correlation
        now = measured.get(name)
        if now is None:  # not requested again, such as contribution norms
            continue
        if not abs(stated - now) <= _MAX_CORRELATION_ERROR:
            yield f"faithfulness: the rank correlation of {name} is {stated}, but {now} as measured"


def _name(entry: Faithfulness) -> str:
    name = ExplainMethod.Name(entry.method).removeprefix("EXPLAIN_METHOD_").lower()
    return entry.control or name.replace("_", " ")


def compare_versions(manifest: Manifest, published: Published | None) -> Iterator[str]:
    """Yield a line per installed package, and for the checkpoint, whose version the manifest does not state.

    Other versions are not wrong, but can explain a difference.
    """
    for name, stated in sorted({**manifest.tool_versions, **manifest.publisher.versions}.items()):
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = "not"
        if installed != stated:
            yield f"{name}: {installed} installed, but {stated} at the export"
    if (
        published
        and manifest.source_revision
        and published.source_revision not in ("", manifest.source_revision)
    ):
        yield f"checkpoint: commit {published.source_revision}, but {manifest.source_revision} at the export"
