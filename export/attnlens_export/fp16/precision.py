"""fp16 as a precision of a bundle: for GPUs."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from onnx import TensorProto

from attnlens.v1 import manifest_pb2
from attnlens.v1.manifest_pb2 import Graph
from attnlens_export.fp16.convert import FP16_PATH, to_fp16
from attnlens_export.fp16.measure import measure_fp16
from attnlens_export.fp16.result import Fp16Result
from attnlens_export.parity.measure import Subject
from attnlens_export.precision import Fp32Graph, Precision, Stated
from attnlens_export.progress import Progress


@dataclass(frozen=True)
class Fp16(Precision):
    """The products of matrices in fp16; it has no options."""

    name: ClassVar[str] = "fp16"
    path: ClassVar[str] = FP16_PATH
    number: ClassVar[manifest_pb2.Precision.ValueType] = manifest_pb2.Precision.PRECISION_FP16
    element_types: ClassVar[frozenset[int]] = frozenset({TensorProto.FLOAT16})

    def write(self, source: Fp32Graph, progress: Progress) -> Stated:
        """Write the graph; it has nothing to state beside its file."""
        progress("Converting to fp16", "", 0, 1)
        self.save(source, to_fp16(source.embeddings))
        return Stated(Graph())

    def measure(self, subject: Subject, _stated: Stated, progress: Progress) -> Fp16Result:
        """Compare the graph with PyTorch on short inputs and sentences."""
        return measure_fp16(subject, partial(progress, "Parity in fp16"))
