"""int8 as a precision of a bundle: for CPUs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from onnx import TensorProto

from attnlens.v1.manifest_pb2 import Graph
from attnlens.v1.tensor_pb2 import DataType
from attnlens_export.int8.quantize import measure_int8, write_int8
from attnlens_export.int8.result import INT8_PATH, Gate, Int8Result
from attnlens_export.parity.measure import Subject
from attnlens_export.precision import Fp32Graph, Precision
from attnlens_export.progress import Progress


@dataclass(frozen=True)
class Int8(Precision):
    """As many products of matrices in int8 as the gate lets through.

    Attributes:
        gate: what the embeddings must keep.
        texts: a file with one text per line, a kind besides those of this package; None: only those.
    """

    name: ClassVar[str] = "int8"
    path: ClassVar[str] = INT8_PATH
    data_type: ClassVar[DataType.ValueType] = DataType.DATA_TYPE_INT8
    operators: ClassVar[frozenset[str]] = frozenset({"QuantizeLinear", "DequantizeLinear"})
    element_types: ClassVar[frozenset[int]] = frozenset({TensorProto.INT8, TensorProto.UINT8})

    gate: Gate = field(default_factory=Gate)
    texts: Path | None = None

    def write(self, source: Fp32Graph, progress: Progress) -> Graph:
        """Search for the fastest graph that passes; state how it was made, the gate and the texts."""
        return Graph(quantization=write_int8(source, self.gate, self.texts, progress))

    def measure(self, subject: Subject, stated: Graph, progress: Progress) -> Int8Result:
        """Compare the graph with that in fp32 on the texts beside them, by the gate that is stated."""
        progress("Int8 against fp32", "", 0, 1)
        return measure_int8(subject.directory, subject.config, stated.quantization)
