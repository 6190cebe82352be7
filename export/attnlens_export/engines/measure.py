"""Does a bundle compute in an engine of the server what it computes in PyTorch?

The graphs are compiled with the properties that the server compiles them with. In each precision of the
embeddings they must pass on the grid of parity and, where the bundle has a tokenizer, on texts of several
kinds; the graph in int8, which has no gate on the grid, on the texts that the bundle verifies it with.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from attnlens.bundle import read_manifest
from attnlens.openvino_settings import OpenvinoPrecision
from attnlens.v1.manifest_pb2 import EngineCheck, Manifest
from attnlens_export.engines.engine import GRAPHS, OPENVINO, Engine
from attnlens_export.engines.grid import measure_grid
from attnlens_export.engines.result import EngineSummary, Part, join, precision_number
from attnlens_export.engines.texts import BF16_LIMITS, FP32_LIMITS, Limits, Texts, measure_texts
from attnlens_export.graph.names import EMBEDDINGS_PATH
from attnlens_export.graph.parameters import rebuild_encoder
from attnlens_export.parity.grid import Case, default_grid
from attnlens_export.parity.measure import Subject
from attnlens_export.progress import Progress, no_progress
from attnlens_model import read_config
from attnlens_runtimes import RuntimeFailureError


def measure_engine(
    directory: Path,
    engine: Engine,
    *,
    parity_tokens: int | None = None,
    grid: Sequence[Case] | None = None,
    progress: Progress = no_progress,
) -> EngineSummary:
    """Measure a bundle whose files are those of its manifest.

    Args:
        directory: the bundle.
        engine: as `find_engine` returned it.
        parity_tokens: the longest input of the grid; None: what memory allows, see `default_grid`.
        grid: the parity cases; None: `default_grid`.
        progress: called before each step.

    Returns:
        The measurements. Nothing is raised for a graph that differs: see `EngineSummary.failures`.

    Raises:
        BundleError: there is no manifest, or it contradicts the files.
        EngineError: the engine opens no graph, or a precision was named that is not there.
        GraphError: a parameter is not in the graph.
    """
    chosen, missing = engine.choose(directory)
    manifest, config = read_manifest(directory), read_config(directory / "config.json")
    encoder = rebuild_encoder(directory / EMBEDDINGS_PATH, config)
    cases = grid or default_grid(config, parity_tokens)
    subject = Subject(directory, encoder, config, "the weights inside the bundle", cases)
    found = measure_grid(subject, engine, chosen, partial(progress, f"{OPENVINO} in {', '.join(chosen)}"))
    # One for all precisions of the graph in fp32.
    texts = Texts.of_package(directory, config)
    results = []
    for precision in chosen:
        progress(f"{OPENVINO} in {precision} on texts", "", 0, 1)
        if precision == "int8":
            texts = Texts.of_int8(directory, config, manifest)
        check = EngineCheck(
            engine=OPENVINO,
            version=engine.version,
            precision=precision_number(precision),
            device=engine.options.device,
            processor=found.processor,
            num_cases=len(cases),
            num_texts=texts.num_texts,
        )
        on_texts = _on_texts(subject, engine, precision, texts, _limits(precision, manifest))
        results.append(join(check, (found.embeddings.get(precision, Part()), on_texts, *found.others)))
    return EngineSummary(tuple(results), tuple(missing))


def _limits(precision: OpenvinoPrecision, manifest: Manifest) -> Limits:
    match precision:
        case "fp32":
            return FP32_LIMITS
        case "bf16":
            return BF16_LIMITS
        case "int8":
            return Limits.of_int8(manifest)


def _on_texts(
    subject: Subject, engine: Engine, precision: OpenvinoPrecision, texts: Texts, limits: Limits
) -> Part:
    path = GRAPHS[precision]
    with ExitStack() as processes:
        try:
            several, one = (
                engine.open(subject.directory, path, subject.config, processes, precision, max_streams)
                for max_streams in (2, 1)
            )
            return measure_texts(several, one, texts, limits)
        except RuntimeFailureError as error:
            return Part(failures=(f"{path}: stopped on texts: {error}",))
