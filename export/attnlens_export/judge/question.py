"""Runs the publisher's pipeline of a checkpoint, and compares a bundle with its results.

The pipeline runs in a process of its own, see `attnlens_publisher`. Its results are stored in a file before
the graphs of the bundle are opened, so that its model and theirs never share memory.
"""

import json
import math
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnlens.costs import flops_per_token
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_export.errors import SourceError
from attnlens_export.int8.texts import read_kinds
from attnlens_export.judge.compare import Rounding, Subject, judge
from attnlens_export.judge.result import PublisherResult
from attnlens_export.parity.long_context import memory_limit
from attnlens_export.parity.sessions import trim_memory
from attnlens_export.progress import StageProgress
from attnlens_export.published.heads import find_head
from attnlens_export.published.modules import MODULES_FILE
from attnlens_export.published.prompts import Prompts
from attnlens_model import EncoderConfig, open_checkpoint, read_config
from attnlens_model.attention.bigbird import BigBirdAttentionConfig
from attnlens_model.attention.longformer import LongformerAttentionConfig
from attnlens_publisher.errors import FailedError, MissingError, RefusedError
from attnlens_publisher.process import LIBRARIES, call
from attnlens_publisher.reference import Probe, needs_modules

MAX_FLOPS = 2e12
MAX_SCORE_BYTES = 2**32
"""Limits of the longest text whose vectors are compared: operations, and attention scores of all layers."""
NEEDS_CODE = "the pipeline needs the publisher's own code, which is not executed"
NO_TOKENIZER = "the bundle has no tokenizer"
CHOSEN = "chosen by "
"""Beginning of the reason for a result that an option of the export replaced."""
_MAX_HEADER_BYTES = 10**8
_MAX_DESCRIBING_BYTES = 4 * 10**9
_MAX_DESCRIBING_S = 120
# They stay imported for the pipeline.
_MODULES = ("torch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")
# A checkpoint may share embeddings, or lack a pooler.
_MAX_SIZE_RATIO = 2
_MAX_SPARE_BYTES = 2**26
# Memory of the process with the publisher's libraries.
_COMPARISON_BYTES = 2**29
_MAX_CONCURRENT_BYTES = 2**29
_WITHOUT = "omit the comparison with --without-comparison"


@dataclass(frozen=True)
class Question:
    """A checkpoint and the options with which it was exported.

    Attributes:
        source: Checkpoint directory.
        config: Configuration of the bundle's encoder.
        kind: "embedder", "scorer", or "encoder" for an encoder without the rest of its checkpoint.
        skipped: Results that an option of the export replaced, with the reason. `token ids`, `embeddings` and
            `similarity` are not compared. The pipeline uses the `prompts` and `global tokens` of the bundle,
            and gets no texts that are long enough for `random blocks`.
    """

    source: Path
    config: EncoderConfig
    kind: str
    skipped: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def question_about(
    directory: Path, manifest: Manifest, source: str | Path, revision: str | None
) -> Iterator[Question | str]:
    """Yield the question for an existing bundle, or the reason why there is nothing to compare.

    Args:
        directory: Bundle directory.
        manifest: Its manifest, which states the options of the export.
        source: Checkpoint of the bundle.
        revision: Branch, tag or commit on the hub.

    Raises:
        CheckpointError: See `open_checkpoint`.
    """
    with open_checkpoint(source, revision) as opened:
        if opened.code:
            yield NEEDS_CODE
        elif not (directory / "tokenizer.json").is_file():
            yield NO_TOKENIZER
        else:
            is_scorer, has_head = manifest.HasField("classifier"), find_head(opened.directory, ())
            kind = "scorer" if is_scorer else "encoder" if has_head else "embedder"
            entries = (entry.partition(": ") for entry in manifest.publisher.not_compared)
            skipped = {result: reason for result, _, reason in entries if reason.startswith(CHOSEN)}
            yield Question(opened.directory, read_config(directory / "config.json"), kind, skipped)


class Answer(NamedTuple):
    """Results of the publisher's pipeline.

    Attributes:
        described: Result of `attnlens_publisher.reference.compute` without the probes.
        probes: Texts with the publisher's results.
    """

    described: dict[str, Any]
    probes: list[Probe]


def compare_with_publisher(
    question: Question,
    subject: Subject,
    rounding: Rounding,
    progress: StageProgress,
    answer: Answer | str | None = None,
) -> PublisherResult:
    """Compare a bundle with the publisher's pipeline of its checkpoint.

    Args:
        question: The checkpoint.
        subject: The bundle.
        rounding: Rounding errors, from which the limits follow.
        progress: Called before each text.
        answer: Result of `ask_publisher`. If None, the pipeline runs now.

    Raises:
        SourceError: See `ask_publisher`.
    """
    if answer is None:
        prompts = Prompts(subject.facts.prompts, subject.facts.default_prompt)
        answer = ask_publisher(question, prompts, progress, takes_pairs=subject.facts.takes_pairs)
    if isinstance(answer, str):
        return PublisherResult(not_compared=(answer,))
    return judge(answer.described, answer.probes, subject, rounding, question.skipped)


def runs_concurrently(source: Path) -> bool:
    """Return whether the pipeline of a checkpoint may run while this process needs its memory."""
    return _weight_bytes(source) <= _MAX_CONCURRENT_BYTES


def ask_publisher(
    question: Question, prompts: Prompts, progress: StageProgress, *, takes_pairs: bool
) -> Answer | str:
    """Run the publisher's pipeline of a checkpoint.

    Args:
        question: The checkpoint.
        prompts: Prompts of the bundle.
        progress: Called before each text.
        takes_pairs: Whether the bundle joins two texts.

    Returns:
        The results, or the reason why there are none.

    Raises:
        SourceError: The pipeline's library is not installed, or can't load the checkpoint.
    """
    trim_memory()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "reference.npz"
        try:
            described = _compute(question, path, progress, prompts, takes_pairs=takes_pairs)
        except RefusedError as error:
            return str(error)
        except MissingError as error:
            extra = "sentence-transformers" if error.package == "sentence-transformers" else "export"
            raise SourceError(
                f"the publisher's results are computed with {error.package}, which is not installed: "
                f'pip install "attnlens[{extra}]", or {_WITHOUT}'
            ) from error
        except FailedError as error:
            raise SourceError(
                f"the publisher's results of {question.source} can't be computed, so the bundle can't be "
                f"compared with them ({error}): correct the checkpoint, or {_WITHOUT}"
            ) from error
        with np.load(path, allow_pickle=False) as arrays:
            probes = [Probe(**entry) for entry in described.pop("probes")]
            for name in arrays.files:
                index, _, kind = name.partition(".")
                probes[int(index)].arrays[kind] = arrays[name]
    return Answer(described, probes)


def _compute(
    question: Question, path: Path, progress: StageProgress, prompts: Prompts, *, takes_pairs: bool
) -> dict[str, Any]:
    texts = [next(filter(None, lines)) for lines in read_kinds(None).values()]
    is_chosen = "prompts" in question.skipped
    has_modules = (question.source / MODULES_FILE).is_file()
    global_tokens = [
        attention.num_global_tokens
        for attention in question.config.layer_attentions
        if isinstance(attention, LongformerAttentionConfig)
    ]
    described: dict[str, Any] = call(
        "attnlens_publisher.reference:compute",
        max_bytes=needed_bytes(question.source),
        imports=libraries_of(question.source),
        report=progress,
        source=str(question.source),
        kind=question.kind,
        texts=texts,
        max_tokens=question.config.max_tokens,
        vector_tokens=longest_vectors(
            question.config, has_random_blocks="random blocks" not in question.skipped
        ),
        prompts=dict(prompts.texts) if is_chosen else {},
        default_prompt=prompts.default_name if is_chosen else None,
        # transformers takes them as an argument of each call.
        num_global_tokens=max(global_tokens, default=None)
        if "global tokens" in question.skipped or not has_modules
        else None,
        takes_pairs=takes_pairs,
        output=str(path),
    )
    return described


def libraries_of(source: Path) -> tuple[str, ...]:
    """Return the libraries that the pipeline of a checkpoint needs, so that no other one is imported."""
    return LIBRARIES if needs_modules(str(source)) else LIBRARIES[:1]


def longest_vectors(config: EncoderConfig, *, has_random_blocks: bool = True) -> int:
    """Return the number of tokens of the longest text that `MAX_FLOPS` and `MAX_SCORE_BYTES` allow.

    Args:
        config: Configuration of the encoder.
        has_random_blocks: Whether the text may be long enough for random blocks.
    """
    linear = flops_per_token(config.hidden_size, config.intermediate_size, config.num_layers)
    quadratic = 4 * config.hidden_size * config.num_layers
    # linear T + quadratic T^2 = MAX_FLOPS
    by_work = (math.sqrt(linear**2 + 4 * quadratic * MAX_FLOPS) - linear) / (2 * quadratic)
    by_memory = math.isqrt(MAX_SCORE_BYTES // (4 * config.num_heads * config.num_layers))
    limits = [config.max_tokens, int(by_work), by_memory]
    limits += [
        attention.table.max_full_blocks * attention.block_size
        for attention in config.layer_attentions
        if isinstance(attention, BigBirdAttentionConfig) and not has_random_blocks
    ]
    return max(1, min(limits))


def needed_bytes(source: Path) -> int:
    """Return the memory that the publisher's pipeline may take: 1.3 times its weights in fp32, and 2 GiB."""
    return int(1.3 * _weight_bytes(source)) + 2**31


def export_bytes(source: Path) -> int:
    """Return the memory that an export with the comparison needs, all processes together."""
    # ONNX Runtime stores the matrices of the contribution graph twice, and PyTorch's gradients need as much.
    return max(needed_bytes(source), 2 * _weight_bytes(source) + 3 * 2**29)


def _weight_bytes(source: Path) -> int:
    return sum(map(_fp32_bytes, _weight_files(source)))


def _weight_files(source: Path) -> list[Path]:
    names = ("model.safetensors", "model-*.safetensors", "pytorch_model*.bin")
    return next(filter(None, (sorted(source.glob(name)) for name in names)), [])


def _fp32_bytes(path: Path) -> int:
    if path.suffix != ".safetensors":
        return 2 * path.stat().st_size  # they may be stored in 16 bits
    try:
        with path.open("rb") as file:
            [length] = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        return sum(4 * math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (AttributeError, KeyError, TypeError, ValueError, struct.error):
        return path.stat().st_size  # a broken file: its reader reports it


def check_memory(source: Path, *, has_comparison: bool) -> None:
    """Check that an export fits into the available memory.

    Raises:
        SourceError: It does not.
    """
    needed = export_bytes(source) - (0 if has_comparison else _COMPARISON_BYTES)
    available = _available_bytes()
    if needed > available:
        remedy = f"free memory, or {_WITHOUT}" if has_comparison else "free memory"
        raise SourceError(
            f"the export needs {needed / 1e9:.1f} GB of memory, but {available / 1e9:.1f} GB are available: "
            f"{remedy}"
        )


def check_described_size(source: Path) -> None:
    """Check in a process with limits that `config.json` describes no larger encoder than the file stores.

    transformers would allocate all of it, and fill what the file lacks with random numbers.

    Raises:
        SourceError: It does.
    """
    try:
        described = 4 * call(
            "attnlens_publisher.sizes:count_parameters",
            max_bytes=_MAX_DESCRIBING_BYTES,
            timeout_s=_MAX_DESCRIBING_S,
            imports=_MODULES,
            source=str(source),
        )
    except MissingError:
        return  # the loader names the library
    except (FailedError, RefusedError) as error:
        raise SourceError(
            f"transformers can't create the encoder that config.json describes: {error}"
        ) from error
    stored = _weight_bytes(source)
    if described > _MAX_SIZE_RATIO * stored + _MAX_SPARE_BYTES:
        raise SourceError(
            f"config.json describes an encoder of {described / 1e9:.1f} GB in fp32, but the checkpoint "
            f"stores {stored / 1e9:.1f} GB: correct the sizes in config.json"
        )


def _available_bytes() -> int:
    """Return the memory that can be allocated without swapping."""
    available = memory_limit()
    path = Path("/proc/meminfo")
    if path.is_file():
        lines = dict(line.split(":", 1) for line in path.read_text(encoding="ascii").splitlines())
        available = min(available, int(lines["MemAvailable"].split()[0]) * 1024)
    return available
