"""What was measured of a graph in int8, and whether that is good enough."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from attnlens.v1 import manifest_pb2
from attnlens.v1.manifest_pb2 import GateKind, Graph, OutputRole, ParityFigure
from attnlens.v1.quantization_pb2 import Quantization, QuantizationMethod, QuantizedTextKind
from attnlens_export.graph.names import graph_id
from attnlens_export.int8.agreement import Agreement
from attnlens_export.json_files import finite
from attnlens_export.precision import GraphResult, Table

INT8_PATH = "onnx/model_int8.onnx"
GRAPH_ID = graph_id(INT8_PATH)
# A text's vectors alone and in a batch. Products in int8 add nothing to what fp32 differs by.
MAX_BATCH_DIFFERENCE = 1e-5


@dataclass(frozen=True)
class Gate:
    """What the embeddings of every kind of text must have: cosines with those of the graph in fp32.

    Attributes:
        min_mean_cosine: the least mean over the texts of a kind.
        min_cosine: the least of any text.
    """

    min_mean_cosine: float = 0.999
    min_cosine: float = 0.995

    @classmethod
    def from_messages(cls, gates: Sequence[manifest_pb2.Gate]) -> Self:
        """Return the gate that a manifest states."""
        limits = {gate.kind: gate.limit for gate in gates if gate.role == OutputRole.OUTPUT_ROLE_EMBEDDING}
        return cls(limits[GateKind.GATE_KIND_MEAN_COSINE], limits[GateKind.GATE_KIND_MIN_COSINE])

    def limits(self) -> tuple[manifest_pb2.Gate, ...]:
        """Return both limits as the manifest has them, without what was found."""
        return (
            self.to_message(GateKind.GATE_KIND_MEAN_COSINE, self.min_mean_cosine),
            self.to_message(GateKind.GATE_KIND_MIN_COSINE, self.min_cosine),
        )

    @staticmethod
    def to_message(
        kind: GateKind.ValueType, limit: float, value: float = 0.0, text_kind: str = ""
    ) -> manifest_pb2.Gate:
        """Return a gate of the embeddings."""
        return manifest_pb2.Gate(
            graph=GRAPH_ID,
            role=OutputRole.OUTPUT_ROLE_EMBEDDING,
            kind=kind,
            limit=limit,
            value=value,
            text_kind=text_kind,
        )

    def use(self, agreement: Agreement) -> float:
        """Return the share of what is allowed that the worst kind uses up: above 1, it fails."""
        shares = [
            (1 - value) / max(1 - least, 1e-12)
            for kind in agreement.kinds.values()
            for value, least in ((kind.mean_cosine, self.min_mean_cosine), (kind.min_cosine, self.min_cosine))
        ]
        return float(np.nan_to_num(np.max(shares), nan=np.inf))

    def tightened(self, share: float) -> "Gate":
        """Return a gate that allows a share of what this one allows."""
        return Gate(1 - share * (1 - self.min_mean_cosine), 1 - share * (1 - self.min_cosine))


@dataclass(frozen=True)
class Int8Result(GraphResult):
    """The graph in int8 against that in fp32, on the texts of `parity/int8_texts.txt`.

    Attributes:
        gate: what it must keep.
        agreement: of the vectors.
        num_texts: how many there were.
        num_tokens: of all texts together.
        max_batch_difference: the largest difference of a token's vector between its batch and its text alone.
        made: how it was made, as the manifest states it.
    """

    name: ClassVar[str] = "int8"
    path: ClassVar[str] = INT8_PATH

    gate: Gate
    agreement: Agreement
    num_texts: int
    num_tokens: int
    max_batch_difference: float
    made: Quantization = field(default_factory=Quantization)

    def failures(self) -> list[str]:
        """Return a line for each gate that does not hold."""
        return list(self._failures())

    def _failures(self) -> Iterator[str]:
        for name, kind in self.agreement.kinds.items():
            for figure, value, least in (
                ("mean", kind.mean_cosine, self.gate.min_mean_cosine),
                ("smallest", kind.min_cosine, self.gate.min_cosine),
            ):
                if not value >= least:
                    yield (
                        f"{INT8_PATH}: the {figure} cosine of {kind.num_texts} embeddings with "
                        f"those in fp32, {name}, is {value:.6f}, at least {least:g} is allowed"
                    )
        if not self.max_batch_difference <= MAX_BATCH_DIFFERENCE:
            yield (
                f"{INT8_PATH}: a text alone and in a batch differ by {self.max_batch_difference:.2e}, "
                f"at most {MAX_BATCH_DIFFERENCE:g} is allowed"
            )

    def figures(self) -> list[ParityFigure]:
        """Return none: what was measured stands in the graph's own entry."""
        return []

    def gates(self) -> list[manifest_pb2.Gate]:
        """Return the gates of each kind of text, then that of the tokens' vectors."""
        gate = self.gate
        gates = [
            message
            for name, kind in self.agreement.kinds.items()
            for message in (
                gate.to_message(GateKind.GATE_KIND_MEAN_COSINE, gate.min_mean_cosine, kind.mean_cosine, name),
                gate.to_message(GateKind.GATE_KIND_MIN_COSINE, gate.min_cosine, kind.min_cosine, name),
            )
        ]
        alone = manifest_pb2.Gate(
            graph=GRAPH_ID,
            role=OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE,
            kind=GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE,
            limit=MAX_BATCH_DIFFERENCE,
            value=self.max_batch_difference,
        )
        return [*gates, alone]

    def describe(self, graph: Graph) -> None:
        """State how it was made and what was measured."""
        message = graph.quantization
        message.CopyFrom(self.made)
        message.num_texts, message.num_tokens = self.num_texts, self.num_tokens
        found = self.agreement
        message.mean_cosine, message.min_cosine = found.mean_cosine, found.min_cosine
        message.mean_token_cosine, message.min_token_cosine = found.mean_token_cosine, found.min_token_cosine
        message.neighbor_agreement = found.neighbor_agreement
        message.max_batch_difference = self.max_batch_difference
        del message.text_kinds[:]
        message.text_kinds.extend(
            QuantizedTextKind(
                name=name,
                num_texts=kind.num_texts,
                mean_cosine=kind.mean_cosine,
                min_cosine=kind.min_cosine,
            )
            for name, kind in found.kinds.items()
        )

    def as_json(self) -> dict[str, Any]:
        """Return the gate and every measurement."""
        values: dict[str, Any] = finite(asdict(self))
        del values["made"]
        return values

    def table(self) -> Table:
        """Return a row for each kind of text, the gate and all texts together."""
        found, gate = self.agreement, self.gate
        kinds = (
            (name, str(kind.num_texts), f"{kind.mean_cosine:.6f}", f"{kind.min_cosine:.6f}")
            for name, kind in found.kinds.items()
        )
        embeddings = (f"{found.mean_cosine:.6f}", f"{found.min_cosine:.6f}")
        tokens = (f"{found.mean_token_cosine:.6f}", f"{found.min_token_cosine:.6f}")
        return Table(
            f"model_int8.onnx against model.onnx, {self.num_texts} texts that had no part in making it",
            ("cosine", "texts", "mean", "smallest"),
            (
                *kinds,
                ("gate, for each", "", f"{gate.min_mean_cosine:g}", f"{gate.min_cosine:g}"),
                ("all embeddings", str(self.num_texts), *embeddings),
                ("all token vectors", "", *tokens),
            ),
            (
                f"the nearest other text is the same for {found.neighbor_agreement:.1%}",
                f"a text alone and in a batch differ by {self.max_batch_difference:.1e}",
                f"products: {_describe_products(self.made)}",
                f"times as fast as fp32, on one thread: {_describe_speeds(self.made)}"
                + ("; UNRELIABLE, the processor was busy" if self.made.unreliable_timings else ""),
            ),
        )


def _describe_products(made: Quantization) -> str:
    methods = Counter(
        QuantizationMethod.Name(product.method).removeprefix("QUANTIZATION_METHOD_").lower()
        for product in made.matmuls
    )
    return ", ".join(f"{count} {method}" for method, count in methods.most_common())


def _describe_speeds(made: Quantization) -> str:
    speeds = (
        f"{speed.batch_size} x {speed.num_tokens} tokens {speed.latency_ms_fp32 / speed.latency_ms:.2f}"
        for speed in made.speeds
    )
    return ", ".join(speeds) or "not measured"
