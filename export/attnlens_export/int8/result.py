"""Accuracy gate of the int8 graph, and the result of its check."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Self

from attnlens.v1 import manifest_pb2
from attnlens.v1.manifest_pb2 import GateKind, OutputRole
from attnlens.v1.quantization_pb2 import Quantization, QuantizationMethod
from attnlens_export.graph.names import graph_id
from attnlens_export.int8.texts import Agreement
from attnlens_export.results import Comparison, Result, kind_name

INT8_PATH = "onnx/model_int8.onnx"
GRAPH_ID = graph_id(INT8_PATH)
# Difference of token vectors between a batch and the text alone. Integer products are exact, so the limit is
# that of fp32.
MAX_BATCH_DIFFERENCE = 1e-5


@dataclass(frozen=True)
class AccuracyGate(ABC):
    """Limits for the results in int8 compared with those in fp32. They apply to each kind of text.

    Fields of subclasses are limits, in the order of `kinds`.

    Attributes:
        role: Role of the results.
        kinds: Kinds of the limits.
        remedy: Advice if no graph is within the limits.
    """

    role: ClassVar[OutputRole.ValueType]
    kinds: ClassVar[tuple[GateKind.ValueType, ...]]
    remedy: ClassVar[str]

    @classmethod
    def from_messages(cls, gates: Sequence[manifest_pb2.Gate]) -> Self:
        """Return the gate that a manifest states."""
        limits = {gate.kind: gate.limit for gate in gates if gate.role == cls.role}
        return cls(*(limits[kind] for kind in cls.kinds))

    @property
    def limits(self) -> dict[GateKind.ValueType, float]:
        """Limits by kind."""
        return dict(zip(self.kinds, asdict(self).values(), strict=True))

    @property
    @abstractmethod
    def allowed_loss(self) -> float:
        """Loss of a graph at the limits, see `Agreement.loss`."""

    @abstractmethod
    def tightened(self, share: float) -> Self:
        """Return a gate that allows only a share of the deviation."""

    def compare(self, agreement: Agreement, path: str = INT8_PATH) -> list[Comparison]:
        """Return the figures of each kind of text, for the graph at `path`."""
        return [
            Comparison(
                graph=path,
                inputs="",
                value=kind.values[gate_kind],
                limit=limit,
                kind=gate_kind,
                role=self.role,
                worst=kind.named_text if gate_kind == GateKind.GATE_KIND_MIN_COSINE else "",
                text_kind=name,
                num_texts=kind.num_texts,
            )
            for name, kind in agreement.kinds.items()
            for gate_kind, limit in self.limits.items()
        ]

    def describe(self) -> str:
        """Return the limits in words."""
        return " and ".join(
            f"a {kind_name(kind).replace('_', ' ')} of {limit:g}" for kind, limit in self.limits.items()
        )

    def advice(self, agreement: Agreement) -> str:
        """Return what to do if no graph is within the limits, given the figures of the best one."""
        del agreement
        return self.remedy

    def to_messages(self) -> tuple[manifest_pb2.Gate, ...]:
        """Return the limits as manifest entries without values."""
        return tuple(
            manifest_pb2.Gate(graph=GRAPH_ID, role=self.role, kind=kind, limit=limit)
            for kind, limit in self.limits.items()
        )

    def used_share(self, agreement: Agreement) -> float:
        """Return the share of the allowed deviation that the worst kind of text uses. Passes if at most 1."""
        return max(comparison.used_share for comparison in self.compare(agreement))


@dataclass(frozen=True)
class Gate(AccuracyGate):
    """Limits for the cosines of embeddings in int8 and in fp32. They apply to each kind of text.

    Attributes:
        min_mean_cosine: Minimum mean over the texts of a kind.
        min_cosine: Minimum of any text.
    """

    role: ClassVar[OutputRole.ValueType] = OutputRole.OUTPUT_ROLE_EMBEDDING
    kinds: ClassVar[tuple[GateKind.ValueType, ...]] = (
        GateKind.GATE_KIND_MEAN_COSINE,
        GateKind.GATE_KIND_MIN_COSINE,
    )
    remedy: ClassVar[str] = "lower --min-mean-cosine or --min-cosine, or export without --precision int8"

    min_mean_cosine: float = 0.999
    min_cosine: float = 0.995

    @property
    def allowed_loss(self) -> float:
        """1 - the minimum mean cosine."""
        return 1 - self.min_mean_cosine

    def advice(self, agreement: Agreement) -> str:
        """Return `remedy`, without the options if no limit accepts the minimum cosine."""
        return self.remedy if agreement.recorded.min_cosine > 0 else "export without --precision int8"

    def tightened(self, share: float) -> Self:
        """Return a gate that allows only a share of the deviation."""
        return type(self)(1 - share * (1 - self.min_mean_cosine), 1 - share * (1 - self.min_cosine))


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
    kinds: ClassVar[tuple[GateKind.ValueType, ...]] = (
        GateKind.GATE_KIND_MIN_RANK_AGREEMENT,
        GateKind.GATE_KIND_MAX_LOGIT_ERROR,
    )
    remedy: ClassVar[str] = "export without --precision int8"

    min_rank_agreement: float = 0.95
    max_logit_error: float = 0.3

    @property
    def allowed_loss(self) -> float:
        """r^2 at the minimum rank agreement."""
        return (math.pi / 2 * (1 - self.min_rank_agreement)) ** 2

    def tightened(self, share: float) -> Self:
        """Return a gate that allows only a share of the deviation."""
        return type(self)(1 - share * (1 - self.min_rank_agreement), share * self.max_logit_error)


@dataclass(frozen=True)
class Int8Result(Result):
    """Comparison of the int8 graph with the fp32 graph on the texts in `parity/int8_texts.txt`.

    Attributes:
        quantization: Quantization and its figures, as the manifest states them.
    """

    quantization: Quantization = field(default_factory=Quantization)


def to_result(
    gate: AccuracyGate, agreement: Agreement, stated: Quantization, num_tokens: int, batch_difference: float
) -> Int8Result:
    """Return the result of the check.

    Args:
        gate: Limits for the embeddings or logits.
        agreement: Agreement of the two graphs.
        stated: Description of the quantization.
        num_tokens: Number of tokens of all texts.
        batch_difference: Maximum difference of a component of a token vector, or of a logit, between the
            batch and the text alone.
    """
    num_texts = sum(kind.num_texts for kind in agreement.kinds.values())
    quantization = Quantization()
    quantization.CopyFrom(stated)
    if agreement.recorded.text_kinds:
        del quantization.text_kinds[:]
    quantization.MergeFrom(agreement.recorded)
    quantization.num_texts, quantization.num_tokens = num_texts, num_tokens
    quantization.max_batch_difference = batch_difference
    is_embedder = gate.role == OutputRole.OUTPUT_ROLE_EMBEDDING
    batch = Comparison(
        graph=INT8_PATH,
        inputs="the first and last text of each batch",
        value=batch_difference,
        limit=MAX_BATCH_DIFFERENCE,
        kind=GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE,
        role=OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE if is_embedder else gate.role,
    )
    unreliable = "; UNRELIABLE, the processor was busy" if stated.unreliable_timings else ""
    return Int8Result(
        title="In int8",
        reference="the graph in fp32",
        inputs=f"{num_texts} texts or pairs that were not used to create it",
        comparisons=(*gate.compare(agreement), batch),
        remarks=(
            f"int8: {agreement.remark}",
            f"int8: matrix products: {_describe_methods(stated)}",
            f"int8: speed relative to fp32, on one thread: {_describe_speeds(stated)}{unreliable}",
        ),
        quantization=quantization,
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
