"""In-process contestants: the attnlens engine and its peers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.cases import MINILM, Choice, RowKey
from bench.made.bundles import STRICT_COSINE
from bench.made.openvino_genai import ENVIRONMENT as GENAI_ENVIRONMENT
from bench.made.openvino_genai import convert
from bench.setting import MAX_TOKENS, Setting
from bench.workloads import CUT_TOKENS

ENGINE, SERVER = "attnlens engine", "attnlens server"
OPENVINO = ", OpenVINO"  # suffix of attnlens rows that use OpenVINO instead of ONNX Runtime
EAGER = "transformers eager"
COMPILED = "transformers compiled"
GENAI = "openvino-genai"
CTRANSLATE2 = "CTranslate2"
STRICT = f"int8 at {STRICT_COSINE}"
ONE_BY_ONE = "embed, one text a call"
ONES = (ONE_BY_ONE, "sentences")
EMBED = tuple(("embed", workload) for workload in ("passages", "sentences", "mixed", "long"))
MAPS = (("attention", "short"), ("attention mean", "short"))
ENGINE_ROWS = (*EMBED, ONES, ("embed", "short"), ("tokens", "mixed"), *MAPS)
SEQUENTIAL = (Choice(1), Choice(8), Choice(32))

Arguments = tuple[object, ...]


@dataclass(frozen=True)
class Contestant:
    """A program that computes embeddings or attention weights.

    Attributes:
        name: Program name in its rows.
        precision: Precision in its rows.
        module: Module to run with `python -m`.
        arguments: Function that returns the module's arguments and creates missing input files.
        environment: Stem of a requirements file in bench/peers/. If empty, the current environment.
        rows: Pairs of task and workload.
        choices: Batching choices to try. The fastest is measured.
    """

    name: str
    precision: str
    module: str
    arguments: Callable[[], Arguments]
    environment: str = ""
    rows: tuple[tuple[str, str], ...] = (*EMBED, ONES)
    choices: tuple[Choice, ...] = SEQUENTIAL

    @property
    def label(self) -> str:
        return f"{self.name} {self.precision}"

    def keys(self, setting: Setting) -> list[RowKey]:
        """Return the keys of the rows whose workload is part of the setting."""
        return [
            RowKey(self.name, self.precision, what, workload, model=setting.model)
            for what, workload in self.rows
            if workload in setting.sizes
        ]


def contestants(setting: Setting) -> list[Contestant]:
    """Return all contestants. The fp32 engine with ONNX Runtime, the reference, is first."""
    return [*our_engines(setting), *with_openvino_genai(setting), *with_ctranslate2(setting),
            *with_sentence_transformers(setting), with_fastembed(setting),
            *with_transformers(setting)]  # fmt: skip


def our_engines(setting: Setting) -> list[Contestant]:
    def engine(name: str, precision: str, rows: Sequence[tuple[str, str]]) -> Contestant:
        bundles = {"int8": setting.int8_bundle, STRICT: setting.strict_bundle}
        bundle = bundles.get(precision, setting.bundle)
        graph = "int8" if precision == STRICT else precision
        arguments = (bundle, name, graph, setting.our_threads, MAX_TOKENS)
        return Contestant(
            ENGINE + (OPENVINO if name == "openvino" else ""),
            precision,
            "bench.ours",
            lambda: arguments,
            rows=tuple(rows),
            choices=(Choice(0),),
        )

    strict = [engine(name, STRICT, EMBED) for name in ("onnxruntime", "openvino")]
    return [
        engine("onnxruntime", "fp32", ENGINE_ROWS),
        engine("onnxruntime", "int8", (*EMBED, ONES)),
        engine("openvino", "fp32", (*EMBED, ONES)),
        engine("openvino", "bf16", (*EMBED, ONES)),
        engine("openvino", "int8", (*EMBED, ONES)),
        *(strict if setting.strict_bundle else []),
    ]


def batchings(
    setting: Setting, sizes: Sequence[int], concurrent_sizes: Sequence[int] = ()
) -> tuple[Choice, ...]:
    """Return choices for one batch at a time, and for as many concurrent batches as there are threads.

    Args:
        setting: Model and number of threads.
        sizes: Batch sizes of single batches.
        concurrent_sizes: Batch sizes of concurrent batches. Defaults to `sizes`.
    """
    choices = tuple(Choice(size) for size in sizes)
    if setting.threads > 1:
        choices += tuple(Choice(size, side_by_side=setting.threads) for size in concurrent_sizes or sizes)
    return choices


def with_openvino_genai(setting: Setting) -> list[Contestant]:
    choices = batchings(setting, (1, 4, 8, 16, 32), (4, 8, 16))

    def genai(precision: str, graph: str, hint: str) -> Contestant:
        def arguments() -> Arguments:
            name = f"openvino-genai-{setting.model.replace(' ', '-')}"
            directory = convert(setting.bundle, name, setting.corpus.calibration, CUT_TOKENS)
            return (directory / graph, hint, setting.threads, MAX_TOKENS)

        module = "bench.peers.with_openvino_genai"
        return Contestant(GENAI, precision, module, arguments, GENAI_ENVIRONMENT, choices=choices)

    return [
        genai("fp32", "fp32", "f32"),
        genai("bf16", "fp32", "bf16"),
        genai("NNCF int8", "int8", "f32"),
        genai("NNCF int8, bf16", "int8", "bf16"),
    ]


def with_ctranslate2(setting: Setting) -> list[Contestant]:
    choices = batchings(setting, (4, 8, 16, 32))

    def ctranslate2(precision: str, compute_type: str) -> Contestant:
        arguments = (setting.checkpoint, compute_type, setting.threads, MAX_TOKENS)
        module = "bench.peers.with_ctranslate2"
        return Contestant(
            CTRANSLATE2, precision, module, lambda: arguments, "ctranslate2", EMBED, choices=choices
        )

    return [ctranslate2("fp32", "float32"), ctranslate2("int8", "int8_float32")]


def with_sentence_transformers(setting: Setting) -> list[Contestant]:
    def st(backend: str, precision: str, environment: str, how: str) -> Contestant:
        directory = setting.bundle if how == "onnx" else setting.checkpoint
        arguments = (directory, how, setting.threads, MAX_TOKENS)
        module = "bench.peers.with_sentence_transformers"
        name = f"sentence-transformers {backend}"
        return Contestant(name, precision, module, lambda: arguments, environment)

    onnx = st("ONNX", "fp32", "onnx", "onnx")
    return [
        st("OpenVINO", "fp32", "openvino", "f32"),
        st("OpenVINO", "bf16", "openvino", "bf16"),
        *([onnx] if setting.model == MINILM else []),
        st("torch", "fp32", "torch", "torch"),
    ]


def with_fastembed(setting: Setting) -> Contestant:
    arguments = (setting.bundle, setting.manifest.architecture.hidden_size, setting.threads, MAX_TOKENS)
    choices = tuple(Choice(size) for size in (1, 8, 32, 256))
    module = "bench.peers.with_fastembed"
    return Contestant("fastembed", "fp32", module, lambda: arguments, "onnx", choices=choices)


def with_transformers(setting: Setting) -> list[Contestant]:
    def transformers(
        implementation: str,
        precision: str,
        rows: tuple[tuple[str, str], ...],
        choices: tuple[Choice, ...] = SEQUENTIAL,
    ) -> Contestant:
        arguments = (setting.checkpoint, implementation, precision, setting.threads, MAX_TOKENS)
        name, module = f"transformers {implementation}", "bench.peers.with_transformers"
        return Contestant(name, precision, module, lambda: arguments, "torch", rows, choices)

    # Only on MiniLM: sentence-transformers runs the same transformers module.
    if setting.model != MINILM:
        return []
    compiled = batchings(setting, (4, 8, 16, 32))
    return [
        transformers("sdpa", "fp32", EMBED),
        transformers("eager", "fp32", MAPS),
        transformers("compiled", "fp32", EMBED, compiled),
        transformers("compiled", "bf16", EMBED, compiled),
    ]
