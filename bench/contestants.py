"""The programs that take texts in-process: our engine and its peers."""

from dataclasses import dataclass

from bench.cases import RowKey
from bench.setting import Setting

ENGINE = "attnlens engine"
EAGER = "transformers eager"
EMBED = tuple(("embed", workload) for workload in ("passages", "sentences", "mixed"))
MAPS = (("attention", "short"), ("attention mean", "short"))
ENGINE_ROWS = (*EMBED, ("embed", "short"), ("tokens", "mixed"), *MAPS)


@dataclass(frozen=True)
class Contestant:
    """A program that turns texts into vectors or attention weights.

    Attributes:
        name: of its rows.
        precision: of its rows.
        module: what `python -m` runs.
        arguments: of that module.
        environment: where it runs: a file of bench/peers/ without `.txt`, or empty for this environment.
        rows: pairs of task and workload.
        batch_sizes: sizes to try; the best one is measured.
    """

    name: str
    precision: str
    module: str
    arguments: tuple[object, ...]
    environment: str = ""
    rows: tuple[tuple[str, str], ...] = EMBED
    batch_sizes: tuple[int, ...] = (1, 8, 32)

    @property
    def label(self) -> str:
        return f"{self.name} {self.precision}"

    def keys(self) -> list[RowKey]:
        return [RowKey(self.name, self.precision, what, workload) for what, workload in self.rows]


def contestants(setting: Setting) -> list[Contestant]:
    """Return all of them, our engine in fp32 first."""
    return [*our_engines(setting), *with_transformers(setting), *with_sentence_transformers(setting),
            with_fastembed(setting)]  # fmt: skip


def our_engines(setting: Setting) -> list[Contestant]:
    def engine(precision: str, rows: tuple[tuple[str, str], ...]) -> Contestant:
        bundle = setting.int8_bundle if precision == "int8" else setting.bundle
        arguments = (bundle, precision, setting.our_threads)
        return Contestant(ENGINE, precision, "bench.ours", arguments, rows=rows, batch_sizes=(0,))

    return [engine("fp32", ENGINE_ROWS), engine("int8", EMBED)]


def with_transformers(setting: Setting) -> list[Contestant]:
    def transformers(implementation: str, rows: tuple[tuple[str, str], ...]) -> Contestant:
        arguments = (setting.checkpoint, implementation, setting.threads, setting.manifest.max_tokens)
        module = "bench.peers.with_transformers"
        return Contestant(f"transformers {implementation}", "fp32", module, arguments, "torch", rows)

    return [transformers("sdpa", EMBED), transformers("eager", MAPS)]


def with_sentence_transformers(setting: Setting) -> list[Contestant]:
    def st(backend: str, precision: str, environment: str, how: str) -> Contestant:
        directory = setting.bundle if how == "onnx" else setting.checkpoint
        arguments = (directory, how, setting.threads, setting.manifest.max_tokens)
        module = "bench.peers.with_sentence_transformers"
        return Contestant(f"sentence-transformers {backend}", precision, module, arguments, environment)

    return [
        st("torch", "fp32", "torch", "torch"),
        st("ONNX", "fp32", "onnx", "onnx"),
        st("OpenVINO", "fp32", "openvino", "f32"),
        st("OpenVINO", "bf16", "openvino", "bf16"),
    ]


def with_fastembed(setting: Setting) -> Contestant:
    arguments = (setting.bundle, setting.manifest.architecture.hidden_size, setting.threads)
    sizes = (1, 8, 32, 256)
    return Contestant("fastembed", "fp32", "bench.peers.with_fastembed", arguments, "onnx", batch_sizes=sizes)
