"""Accuracy gate of the int8 graph, and the result of its check."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

from attnlens.v1 import manifest_pb2
from attnlens.v1.manifest_pb2 import GateKind, Graph, OutputRole
from attnlens.v1.quantization_pb2 import Quantization, QuantizationMethod
from attnlens_export.graph.names import graph_id
from attnlens_export.int8.logits import LogitsAgreement
from attnlens_export.int8.texts import Agreement, Comparison
from attnlens_export.json_files import finite
from attnlens_export.results import Figure, GraphResult, Table

INT8_PATH = "onnx/model_int8.onnx"
GRAPH_ID = graph_id(INT8_PATH)
# Difference of token vectors between a batch and the text alone. Integer products are exact, so the limit is
# that of fp32.
MAX_BATCH_DIFFERENCE = 1e-5


class AccuracyGate(ABC):
    """Limits for the results in int8 compared with those in fp32.

    Attributes:
        role: Role of the results.
        remedy: Advice if no graph is within the limits.
    """

    role: ClassVar[OutputRole.ValueType]
    remedy: ClassVar[str]

    @classmethod
    @abstractmethod
    def from_messages(cls, gates: Sequence[manifest_pb2.Gate]) -> Self:
        """Return the gate that a manifest states."""

    @property
    @abstractmethod
    def limits(self) -> dict[GateKind.ValueType, float]:
        """Limits by kind."""

    @property
    @abstractmethod
    def allowed_loss(self) -> float:
        """Loss of a graph at the limits, see `Comparison.loss`."""

    @abstractmethod
    def figures(self, agreement: Comparison, path: str = INT8_PATH) -> list[Figure]:
        """Return the figures of each kind of text, for the graph at `path`."""

    @abstractmethod
    def tightened(self, share: float) -> Self:
        """Return a gate that allows only a share of the deviation."""

    @abstractmethod
    def describe(self) -> str:
        """Return the limits in words."""

    @abstractmethod
    def rows(self, agreement: Comparison) -> Iterator[tuple[str, ...]]:
        """Yield the rows of the table: the headings, each kind of text, the gate."""

    @abstractmethod
    def remark(self, agreement: Comparison) -> str:
        """Return a further figure of all texts."""

    def advice(self, agreement: Comparison) -> str:
        """Return what to do if no graph is within the limits, given the figures of the best one."""
        del agreement
        return self.remedy

    def to_messages(self) -> tuple[manifest_pb2.Gate, ...]:
        """Return the limits as manifest entries without values."""
        return tuple(
            manifest_pb2.Gate(graph=GRAPH_ID, role=self.role, kind=kind, limit=limit)
            for kind, limit in self.limits.items()
        )

    def used_share(self, agreement: Comparison) -> float:
        """Return the share of the allowed deviation that the worst kind of text uses. Passes if at most 1."""
        return max(figure.used_share for figure in self.figures(agreement))


@dataclass(frozen=True)
class Gate(AccuracyGate):
    """Limits for the cosines of embeddings in int8 and in fp32. They apply to each kind of text.

    Attributes:
        min_mean_cosine: Minimum mean over the texts of a kind.
        min_cosine: Minimum of any text.
    """

    role: ClassVar[OutputRole.ValueType] = OutputRole.OUTPUT_ROLE_EMBEDDING
    remedy: ClassVar[str] = "lower --min-mean-cosine or --min-cosine, or export without --precision int8"

    min_mean_cosine: float = 0.999
    min_cosine: float = 0.995

    @classmethod
    def from_messages(cls, gates: Sequence[manifest_pb2.Gate]) -> Self:
        """Return the gate that a manifest states."""
        limits = {gate.kind: gate.limit for gate in gates if gate.role == cls.role}
        return cls(limits[GateKind.GATE_KIND_MEAN_COSINE], limits[GateKind.GATE_KIND_MIN_COSINE])

    @property
    def limits(self) -> dict[GateKind.ValueType, float]:
        """Both limits by kind."""
        return {
            GateKind.GATE_KIND_MEAN_COSINE: self.min_mean_cosine,
            GateKind.GATE_KIND_MIN_COSINE: self.min_cosine,
        }

    @property
    def allowed_loss(self) -> float:
        """1 - the minimum mean cosine."""
        return 1 - self.min_mean_cosine

    def figures(self, agreement: Comparison, path: str = INT8_PATH) -> list[Figure]:
        """Return the mean and the minimum cosine of each kind of text, for the graph at `path`."""
        assert isinstance(agreement, Agreement)  # noqa: S101 - the figures of embeddings
        return [
            Figure(
                path,
                value,
                limit,
                f"{path}: the {statistic} cosine of {kind.num_texts} embeddings ({name}) with fp32 is "
                f"{value:.7g}{text} (limit {limit:g})",
                gate_kind,
                OutputRole.OUTPUT_ROLE_EMBEDDING,
                name,
            )
            for name, kind in agreement.kinds.items()
            for statistic, gate_kind, value, limit, text in (
                ("mean", GateKind.GATE_KIND_MEAN_COSINE, kind.mean_cosine, self.min_mean_cosine, ""),
                (
                    "minimum",
                    GateKind.GATE_KIND_MIN_COSINE,
                    kind.min_cosine,
                    self.min_cosine,
                    f", for the text {kind.named_text}",
                ),
            )
        ]

    def advice(self, agreement: Comparison) -> str:
        """Return `remedy`, without the options if no limit accepts the minimum cosine."""
        assert isinstance(agreement, Agreement)  # noqa: S101 - the figures of embeddings
        return self.remedy if agreement.min_cosine > 0 else "export without --precision int8"

    def tightened(self, share: float) -> Self:
        """Return a gate that allows only a share of the deviation."""
        return type(self)(1 - share * (1 - self.min_mean_cosine), 1 - share * (1 - self.min_cosine))

    def describe(self) -> str:
        """Return both limits."""
        return f"a mean cosine of {self.min_mean_cosine:g} and a minimum cosine of {self.min_cosine:g}"

    def rows(self, agreement: Comparison) -> Iterator[tuple[str, ...]]:
        """Yield the cosines of each kind, the gate, and the cosines of all embeddings and token vectors."""
        assert isinstance(agreement, Agreement)  # noqa: S101 - the figures of embeddings
        yield "cosine", "texts", "mean", "minimum"
        for name, kind in agreement.kinds.items():
            yield name, str(kind.num_texts), f"{kind.mean_cosine:.6f}", f"{kind.min_cosine:.6f}"
        yield "gate, for each", "", f"{self.min_mean_cosine:g}", f"{self.min_cosine:g}"
        num_texts = sum(kind.num_texts for kind in agreement.kinds.values())
        embeddings = (f"{agreement.mean_cosine:.6f}", f"{agreement.min_cosine:.6f}")
        yield "all embeddings", str(num_texts), *embeddings
        yield (
            "all token vectors",
            "",
            f"{agreement.mean_token_cosine:.6f}",
            f"{agreement.min_token_cosine:.6f}",
        )

    def remark(self, agreement: Comparison) -> str:
        """Return the agreement of nearest neighbors."""
        assert isinstance(agreement, Agreement)  # noqa: S101 - the figures of embeddings
        return f"the nearest other text is the same for {agreement.neighbor_agreement:.1%}"


@dataclass(frozen=True)
class LogitsGate(AccuracyGate):
    """Limits for the logits of a classifier. They apply to each kind of text.

    For independent errors with the standard deviation r, relative to the spread of the logits, the rank
    agreement is 1 - 2 r / pi. The default corresponds to r = 0.08.

    Attributes:
        min_rank_agreement: Minimum rank correlation with the logits in fp32, see `logits.rank_agreement`.
        max_logit_error: Maximum error of a logit, relative to the spread of all logits in fp32.
    """

    role: ClassVar[OutputRole.ValueType] = OutputRole.OUTPUT_ROLE_LOGITS
    remedy: ClassVar[str] = "export without --precision int8"

    min_rank_agreement: float = 0.95
    max_logit_error: float = 0.3

    @classmethod
    def from_messages(cls, gates: Sequence[manifest_pb2.Gate]) -> Self:
        """Return the gate that a manifest states."""
        limits = {gate.kind: gate.limit for gate in gates if gate.role == cls.role}
        return cls(limits[GateKind.GATE_KIND_MIN_RANK_AGREEMENT], limits[GateKind.GATE_KIND_MAX_LOGIT_ERROR])

    @property
    def limits(self) -> dict[GateKind.ValueType, float]:
        """Both limits by kind."""
        return {
            GateKind.GATE_KIND_MIN_RANK_AGREEMENT: self.min_rank_agreement,
            GateKind.GATE_KIND_MAX_LOGIT_ERROR: self.max_logit_error,
        }

    @property
    def allowed_loss(self) -> float:
        """r^2 at the minimum rank agreement."""
        return (math.pi / 2 * (1 - self.min_rank_agreement)) ** 2

    def figures(self, agreement: Comparison, path: str = INT8_PATH) -> list[Figure]:
        """Return rank agreement and maximum error of each kind of text, for the graph at `path`."""
        assert isinstance(agreement, LogitsAgreement)  # noqa: S101 - the figures of logits
        return [
            Figure(
                path,
                value,
                limit,
                f"{path}: the {statistic} of the logits of {kind.num_texts} texts and pairs ({name}) "
                f"compared with fp32 is {value:.4f} (limit {limit:g})",
                gate_kind,
                self.role,
                name,
            )
            for name, kind in agreement.kinds.items()
            for statistic, gate_kind, value, limit in (
                (
                    "rank agreement",
                    GateKind.GATE_KIND_MIN_RANK_AGREEMENT,
                    kind.rank_agreement,
                    self.min_rank_agreement,
                ),
                (
                    "maximum relative error",
                    GateKind.GATE_KIND_MAX_LOGIT_ERROR,
                    kind.max_error,
                    self.max_logit_error,
                ),
            )
        ]

    def tightened(self, share: float) -> Self:
        """Return a gate that allows only a share of the deviation."""
        return type(self)(1 - share * (1 - self.min_rank_agreement), share * self.max_logit_error)

    def describe(self) -> str:
        """Return both limits."""
        return (
            f"a rank agreement of {self.min_rank_agreement:g} and a maximum relative logit error of "
            f"{self.max_logit_error:g}"
        )

    def rows(self, agreement: Comparison) -> Iterator[tuple[str, ...]]:
        """Yield the figures of each kind, and the gate."""
        assert isinstance(agreement, LogitsAgreement)  # noqa: S101 - the figures of logits
        yield "logits", "texts and pairs", "rank agreement", "max error", "rms error"
        for name, kind in agreement.kinds.items():
            errors = (f"{kind.max_error:.4f}", f"{kind.rms_error:.4f}")
            yield name, str(kind.num_texts), f"{kind.rank_agreement:.4f}", *errors
        yield "gate, for each", "", f"{self.min_rank_agreement:g}", f"{self.max_logit_error:g}", ""

    def remark(self, agreement: Comparison) -> str:
        """Return the unit of the errors."""
        assert isinstance(agreement, LogitsAgreement)  # noqa: S101 - the figures of logits
        return f"errors are relative to the spread of the logits in fp32, {agreement.spread:.4g}"


@dataclass(frozen=True)
class Int8Result(GraphResult):
    """Comparison of the int8 graph with the fp32 graph on the texts in `parity/int8_texts.txt`.

    Attributes:
        gate: Limits for the embeddings or logits.
        agreement: Agreement of the two graphs.
        num_texts: Number of texts.
        num_tokens: Number of tokens of all texts.
        max_batch_difference: Maximum difference of a component of a token vector, or of a logit, between the
            batch and the text alone.
        made: Description of the quantization, as the manifest states it.
    """

    name: ClassVar[str] = "int8"
    path: ClassVar[str] = INT8_PATH
    title: ClassVar[str] = "In int8"

    gate: AccuracyGate
    agreement: Comparison
    num_texts: int
    num_tokens: int
    max_batch_difference: float
    made: Quantization = field(default_factory=Quantization)

    def figures(self) -> list[Figure]:
        """Return the figures of each kind of text, then the difference that a batch makes."""
        is_embedder = self.gate.role == OutputRole.OUTPUT_ROLE_EMBEDDING
        failure = (
            f"{INT8_PATH}: a {'token vector' if is_embedder else 'logit'} differs by "
            f"{self.max_batch_difference:.2e} between the batch and the text alone (limit "
            f"{MAX_BATCH_DIFFERENCE:g})"
        )
        batch_difference = Figure(
            INT8_PATH,
            self.max_batch_difference,
            MAX_BATCH_DIFFERENCE,
            failure,
            GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE,
            OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE if is_embedder else self.gate.role,
        )
        return [*self.gate.figures(self.agreement), batch_difference]

    def describe(self, graph: Graph) -> None:
        """Add the quantization and the measurements to the manifest entry of the graph."""
        message = graph.quantization
        message.CopyFrom(self.made)
        message.num_texts, message.num_tokens = self.num_texts, self.num_tokens
        message.max_batch_difference = self.max_batch_difference
        self.agreement.record(message)

    def to_json(self) -> dict[str, Any]:
        """Return the gate and every measurement."""
        values: dict[str, Any] = finite(asdict(self))
        del values["made"]
        return values

    def table(self) -> Table:
        """Return one row per kind of text, and one for the gate."""
        headings, *rows = self.gate.rows(self.agreement)
        inputs = f"{self.num_texts} {headings[1]} that were not used to create it"
        return Table(
            f"model_int8.onnx against model.onnx on {inputs}",
            headings,
            tuple(rows),
            (
                self.gate.remark(self.agreement),
                f"a text alone and in a batch differ by {self.max_batch_difference:.1e}",
                f"matrix products: {_describe_methods(self.made)}",
                f"speed relative to fp32, on one thread: {_describe_speeds(self.made)}"
                + ("; UNRELIABLE, the processor was busy" if self.made.unreliable_timings else ""),
            ),
        )


def _describe_methods(quantization: Quantization) -> str:
    methods = Counter(
        QuantizationMethod.Name(product.method).removeprefix("QUANTIZATION_METHOD_").lower()
        for product in quantization.matmuls
    )
    return ", ".join(f"{count} {method}" for method, count in methods.most_common())


def _describe_speeds(quantization: Quantization) -> str:
    speeds = (
        f"{speed.batch_size} x {speed.num_tokens} tokens {speed.latency_ms_fp32 / speed.latency_ms:.2f}"
        for speed in quantization.speeds
    )
    return ", ".join(speeds) or "not measured"
