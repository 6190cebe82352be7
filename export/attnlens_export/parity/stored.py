"""Results of the PyTorch encoder, stored so that the encoder is freed before the graphs are opened.

An encoder and an ONNX Runtime session with its copies of the weights would need twice the memory.

Shapes: B texts in a batch, T tokens, D hidden size.
"""

import gc
import mmap
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from attnlens_export.graph.names import HIDDEN_OUTPUT
from attnlens_export.parity.grid import Case, Inputs
from attnlens_export.parity.reference import (
    RUN_LOCK,
    Float64Arithmetic,
    FloatArray,
    make_clear_inputs,
    run_float64,
    run_fp32,
)
from attnlens_export.parity.sessions import trim_memory
from attnlens_model import Encoder, EncoderConfig, ModuleEncoder

_MAX_RESIDENT_BYTES = 2**16

T = TypeVar("T")


class Outputs(Mapping[str, FloatArray]):
    """Outputs of an encoder by name. Those over 64 KiB are in a file, and read when they are accessed."""

    def __init__(self) -> None:
        self._arrays: dict[str, Callable[[], FloatArray]] = {}

    def add(self, name: str, array: FloatArray) -> None:
        """Store an output."""
        self._arrays[name] = _File(array).read if array.nbytes > _MAX_RESIDENT_BYTES else lambda: array

    def __getitem__(self, name: str) -> FloatArray:
        return self._arrays[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class _File:
    """An array in a file without a name, which the system deletes when its mapping is released."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._dtype, self._shape = array.dtype, array.shape
        with tempfile.TemporaryFile() as file:
            np.ascontiguousarray(array).tofile(file)
            file.flush()
            self._pages = mmap.mmap(file.fileno(), array.nbytes, access=mmap.ACCESS_READ)

    def read(self) -> npt.NDArray[Any]:
        array = np.frombuffer(self._pages, self._dtype).reshape(self._shape).copy()
        if hasattr(mmap, "MADV_DONTNEED"):
            self._pages.madvise(mmap.MADV_DONTNEED)  # its pages would count as memory of this process
        return array


class References:
    """Results of a PyTorch encoder. Each is computed when it is first needed.

    Args:
        encoder: Encoder in fp32 and eval mode, on the CPU.
        is_owned: Whether `release` may delete the weights. False for a module of the user.
    """

    def __init__(self, encoder: Encoder | ModuleEncoder, *, is_owned: bool = False) -> None:
        self._encoder: Encoder | ModuleEncoder | None = encoder
        self._is_owned = is_owned
        self._results: dict[object, Any] = {}
        self._arithmetic = Float64Arithmetic()

    @property
    def encoder(self) -> Encoder | ModuleEncoder:
        """The encoder.

        Raises:
            RuntimeError: It was released.
        """
        if self._encoder is None:
            raise RuntimeError("a result of the PyTorch encoder was not stored before its release")
        return self._encoder

    def get(self, key: object, compute: Callable[[Encoder | ModuleEncoder], T]) -> T:
        """Return a result, which is computed when it is first needed."""
        with RUN_LOCK:
            if key not in self._results:
                self._results[key] = compute(self.encoder)
                trim_memory()  # casts to float64 are pieces that the allocator would keep
            result: T = self._results[key]
            return result

    def inputs(self, case: Case, config: EncoderConfig) -> Inputs:
        """Return the inputs of a case, see `make_clear_inputs`."""
        return self.get(case, lambda encoder: make_clear_inputs(case, config, encoder))

    def fp32(self, inputs: Inputs, *, with_attentions: bool = False) -> Outputs:
        """Return the hidden states (B, T, D), and the attention outputs if requested."""

        def compute(encoder: Encoder | ModuleEncoder) -> Outputs:
            outputs = Outputs()
            for name, array in run_fp32(encoder, inputs, with_attentions).items():
                outputs.add(name, array)
            return outputs

        return self._outputs("fp32", inputs, with_attentions, compute)

    def float64(self, inputs: Inputs, *, with_attentions: bool = False) -> Outputs:
        """Return the outputs of `fp32` in float64."""

        def compute(encoder: Encoder | ModuleEncoder) -> Outputs:
            outputs = Outputs()
            each = outputs.add if with_attentions else lambda _name, _array: None
            outputs.add(HIDDEN_OUTPUT, run_float64(encoder, inputs, each, self._arithmetic))
            return outputs

        return self._outputs("float64", inputs, with_attentions, compute)

    def _outputs(
        self,
        kind: str,
        inputs: Inputs,
        with_attentions: bool,
        compute: Callable[[Encoder | ModuleEncoder], Outputs],
    ) -> Outputs:
        values = tuple((array.shape, array.tobytes()) for array in inputs.feed().values())
        complete = (kind, True, values)
        key = complete if with_attentions or complete in self._results else (kind, False, values)
        return self.get(key, compute)

    def release(self) -> None:
        """Free the encoder. Results that are not stored can't be computed any more."""
        encoder, self._encoder, self._arithmetic = self._encoder, None, Float64Arithmetic()
        if encoder is not None and self._is_owned:
            for parameter in encoder.parameters():
                parameter.data = parameter.new_empty(0)  # torch.export keeps references to parameters
        del encoder
        free_memory()


def free_memory() -> None:
    """Return the memory of freed encoders to the system."""
    gc.collect()  # modules of transformers refer to themselves
    trim_memory()
