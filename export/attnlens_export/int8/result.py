"""What was measured of a graph in int8, and whether that is good enough."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnlens.v1 import manifest_pb2
from attnlens.v1.manifest_pb2 import GateKind, Manifest, OutputRole
from attnlens.v1.quantization_pb2 import Quantization, QuantizedTextKind
from attnlens_export.int8.agreement import Agreement

GRAPH_ID = "embeddings.int8"
# A text's vectors alone and in a batch. Products in int8 add nothing to what fp32 differs by.
MAX_ALONE_ERROR = 1e-5


@dataclass(frozen=True)
class Gate:
    """What the embeddings of every kind of text must have: cosines with those of the graph in fp32.

    Attributes:
        min_mean_cosine: the least mean over the texts of a kind.
        min_cosine: the least of any text.
    """

    min_mean_cosine: float = 0.999
    min_cosine: float = 0.995

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
class Int8Result:
    """The graph in int8 against that in fp32, on the texts of `parity/int8_texts.txt`.

    Attributes:
        gate: what it must keep.
        agreement: of the vectors.
        num_texts: how many there were.
        num_tokens: of all texts together.
        alone_error: the largest difference of a token's vector between its batch and its text alone.
    """

    gate: Gate
    agreement: Agreement
    num_texts: int
    num_tokens: int
    alone_error: float

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
                        f"onnx/model_int8.onnx: the {figure} cosine of {kind.num_texts} embeddings with "
                        f"those in fp32, {name}, is {value:.6f}, at least {least:g} is allowed"
                    )
        if not self.alone_error <= MAX_ALONE_ERROR:
            yield (
                f"onnx/model_int8.onnx: a text alone and in a batch differ by {self.alone_error:.2e}, "
                f"at most {MAX_ALONE_ERROR:g} is allowed"
            )

    def gates(self) -> list[manifest_pb2.Gate]:
        """Return the gates of each kind of text with what was found."""
        return [
            manifest_pb2.Gate(
                graph=GRAPH_ID,
                role=OutputRole.OUTPUT_ROLE_EMBEDDING,
                kind=gate_kind,
                limit=limit,
                found=found,
                text_kind=name,
            )
            for name, kind in self.agreement.kinds.items()
            for gate_kind, limit, found in (
                (GateKind.GATE_KIND_MEAN_COSINE, self.gate.min_mean_cosine, kind.mean_cosine),
                (GateKind.GATE_KIND_MIN_COSINE, self.gate.min_cosine, kind.min_cosine),
            )
        ] + [
            manifest_pb2.Gate(
                graph=GRAPH_ID,
                role=OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE,
                kind=GateKind.GATE_KIND_MAX_ALONE_ERROR,
                limit=MAX_ALONE_ERROR,
                found=self.alone_error,
            )
        ]

    def write_to(self, message: Quantization) -> None:
        """Put the measurements into the manifest's message."""
        message.num_texts, message.num_tokens = self.num_texts, self.num_tokens
        found = self.agreement
        message.mean_cosine, message.min_cosine = found.mean_cosine, found.min_cosine
        message.mean_token_cosine, message.min_token_cosine = found.mean_token_cosine, found.min_token_cosine
        message.neighbour_agreement = found.neighbour_agreement
        message.alone_error = self.alone_error
        del message.kinds[:]
        message.kinds.extend(
            QuantizedTextKind(
                name=name,
                num_texts=kind.num_texts,
                mean_cosine=kind.mean_cosine,
                min_cosine=kind.min_cosine,
            )
            for name, kind in found.kinds.items()
        )


def claimed_gate(manifest: Manifest) -> Gate:
    """Return the gate that the graph in int8 had to pass when it was made."""
    limits = {
        gate.kind: gate.limit
        for gate in manifest.parity.gates
        if gate.graph == GRAPH_ID and gate.role == OutputRole.OUTPUT_ROLE_EMBEDDING
    }
    return Gate(limits[GateKind.GATE_KIND_MEAN_COSINE], limits[GateKind.GATE_KIND_MIN_COSINE])
