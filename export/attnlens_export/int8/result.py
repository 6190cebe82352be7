"""Accuracy gate of the int8 graph, and the result of its check."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

from attnlens.v1 import manifest_pb2
from attnlens.v1.manifest_pb2 import GateKind, Graph, OutputRole
from attnlens.v1.quantization_pb2 import Quantization, QuantizationMethod, QuantizedTextKind
from attnlens_export.graph.names import graph_id
from attnlens_export.int8.texts import Agreement
from attnlens_export.json_files import finite
from attnlens_export.results import Figure, GraphResult, Table

INT8_PATH = "onnx/model_int8.onnx"
GRAPH_ID = graph_id(INT8_PATH)
# Difference of token vectors between a batch and the text alone. Integer products are exact, so the limit is
# that of fp32.
MAX_BATCH_DIFFERENCE = 1e-5


@dataclass(frozen=True)
class Gate:
    """Limits for the cosines of embeddings in int8 and in fp32. They apply to each kind of text.

    Attributes:
        min_mean_cosine: Minimum mean over the texts of a kind.
        min_cosine: Minimum of any text.
    """

    min_mean_cosine: float = 0.999
    min_cosine: float = 0.995

    @classmethod
    def from_messages(cls, gates: Sequence[manifest_pb2.Gate]) -> Self:
        """Return the gate that a manifest states."""
        limits = {gate.kind: gate.limit for gate in gates if gate.role == OutputRole.OUTPUT_ROLE_EMBEDDING}
        return cls(limits[GateKind.GATE_KIND_MEAN_COSINE], limits[GateKind.GATE_KIND_MIN_COSINE])

    def to_messages(self) -> tuple[manifest_pb2.Gate, ...]:
        """Return both limits as manifest entries without values."""
        return tuple(
            manifest_pb2.Gate(graph=GRAPH_ID, role=OutputRole.OUTPUT_ROLE_EMBEDDING, kind=kind, limit=limit)
            for kind, limit in (
                (GateKind.GATE_KIND_MEAN_COSINE, self.min_mean_cosine),
                (GateKind.GATE_KIND_MIN_COSINE, self.min_cosine),
            )
        )

    def figures(self, agreement: Agreement, path: str = INT8_PATH) -> list[Figure]:
        """Return the mean and the minimum cosine of each kind of text, for the graph at `path`."""
        return [
            Figure(
                path,
                value,
                limit,
                f"{path}: the {statistic} cosine of {kind.num_texts} embeddings ({name}) with fp32 is "
                f"{value:.7g} (limit {limit:g})",
                gate_kind,
                OutputRole.OUTPUT_ROLE_EMBEDDING,
                name,
            )
            for name, kind in agreement.kinds.items()
            for statistic, gate_kind, value, limit in (
                ("mean", GateKind.GATE_KIND_MEAN_COSINE, kind.mean_cosine, self.min_mean_cosine),
                ("minimum", GateKind.GATE_KIND_MIN_COSINE, kind.min_cosine, self.min_cosine),
            )
        ]

    def used_share(self, agreement: Agreement) -> float:
        """Return the share of the allowed deviation that the worst kind of text uses. Passes if at most 1."""
        return max(figure.used_share for figure in self.figures(agreement))

    def tightened(self, share: float) -> "Gate":
        """Return a gate that allows only a share of the deviation."""
        return Gate(1 - share * (1 - self.min_mean_cosine), 1 - share * (1 - self.min_cosine))


@dataclass(frozen=True)
class Int8Result(GraphResult):
    """Comparison of the int8 graph with the fp32 graph on the texts in `parity/int8_texts.txt`.

    Attributes:
        gate: Limits for the embeddings.
        agreement: Agreement of the two graphs.
        num_texts: Number of texts.
        num_tokens: Number of tokens of all texts.
        max_batch_difference: Maximum difference of a token vector between the batch and the text alone.
        made: Description of the quantization, as the manifest states it.
    """

    name: ClassVar[str] = "int8"
    path: ClassVar[str] = INT8_PATH
    title: ClassVar[str] = "In int8"

    gate: Gate
    agreement: Agreement
    num_texts: int
    num_tokens: int
    max_batch_difference: float
    made: Quantization = field(default_factory=Quantization)

    def figures(self) -> list[Figure]:
        """Return the cosines of each kind of text, then the difference that a batch makes."""
        failure = (
            f"{INT8_PATH}: a token vector differs by {self.max_batch_difference:.2e} between the batch and "
            f"the text alone (limit {MAX_BATCH_DIFFERENCE:g})"
        )
        batch_difference = Figure(
            INT8_PATH,
            self.max_batch_difference,
            MAX_BATCH_DIFFERENCE,
            failure,
            GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE,
            OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE,
        )
        return [*self.gate.figures(self.agreement), batch_difference]

    def describe(self, graph: Graph) -> None:
        """Add the quantization and the measurements to the manifest entry of the graph."""
        message, agreement = graph.quantization, self.agreement
        message.CopyFrom(self.made)
        message.num_texts, message.num_tokens = self.num_texts, self.num_tokens
        message.mean_cosine, message.min_cosine = agreement.mean_cosine, agreement.min_cosine
        message.mean_token_cosine = agreement.mean_token_cosine
        message.min_token_cosine = agreement.min_token_cosine
        message.neighbor_agreement = agreement.neighbor_agreement
        message.max_batch_difference = self.max_batch_difference
        del message.text_kinds[:]
        message.text_kinds.extend(
            QuantizedTextKind(
                name=name,
                num_texts=kind.num_texts,
                mean_cosine=kind.mean_cosine,
                min_cosine=kind.min_cosine,
            )
            for name, kind in agreement.kinds.items()
        )

    def to_json(self) -> dict[str, Any]:
        """Return the gate and every measurement."""
        values: dict[str, Any] = finite(asdict(self))
        del values["made"]
        return values

    def table(self) -> Table:
        """Return one row per kind of text, one for the gate and one for all texts."""
        agreement, gate = self.agreement, self.gate
        kinds = (
            (name, str(kind.num_texts), f"{kind.mean_cosine:.6f}", f"{kind.min_cosine:.6f}")
            for name, kind in agreement.kinds.items()
        )
        embeddings = (f"{agreement.mean_cosine:.6f}", f"{agreement.min_cosine:.6f}")
        tokens = (f"{agreement.mean_token_cosine:.6f}", f"{agreement.min_token_cosine:.6f}")
        return Table(
            f"model_int8.onnx against model.onnx on {self.num_texts} texts that were not used to create it",
            ("cosine", "texts", "mean", "minimum"),
            (
                *kinds,
                ("gate, for each", "", f"{gate.min_mean_cosine:g}", f"{gate.min_cosine:g}"),
                ("all embeddings", str(self.num_texts), *embeddings),
                ("all token vectors", "", *tokens),
            ),
            (
                f"the nearest other text is the same for {agreement.neighbor_agreement:.1%}",
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
