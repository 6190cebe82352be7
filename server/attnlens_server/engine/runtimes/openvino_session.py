"""Graphs compiled by OpenVINO, with one stream per concurrent batch."""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from attnlens_server.engine.batch import HostOutputs, Inputs
from attnlens_server.engine.runtimes.runtime import Cancellation, TimeLimit, Value, feed_of
from attnlens_server.errors import StartupError

if TYPE_CHECKING:
    from openvino import CompiledModel, InferRequest

CompileModel = Callable[[str, dict[str, str]], "CompiledModel"]

# Suffix that the ONNX frontend appends to the name of a graph output.
_OUTPUT_SUFFIX = "/sink_port_0"
# ONNX names of OpenVINO's data types.
_ONNX_TYPES = {"f32": "float", "f16": "float16", "f64": "double", "i64": "int64", "i32": "int32"}
_PRECISION = "INFERENCE_PRECISION_HINT"


class OpenvinoSession:
    """A compiled graph. Implements `Session`."""

    providers: tuple[str, ...] = ()
    # Its nodes then have the shapes of different batches: the next batch in the same stream fails, at best.
    survives_cancellation = False

    def __init__(
        self,
        compile_model: CompileModel,
        graph: Path,
        device: str,
        properties: dict[str, str],
        limit: TimeLimit | None = None,
    ) -> None:
        """Compile a graph.

        Args:
            compile_model: Reads the graph and compiles it for a device with the given properties.
            graph: Path of the graph, for error messages.
            device: OpenVINO device name.
            properties: OpenVINO properties by name.
            limit: Time limit.

        Raises:
            StartupError: OpenVINO cannot compile the graph in time or in the requested precision.
        """
        self._compiled = _compiled(compile_model, graph, device, properties, limit)
        self.inputs = tuple(_describe(value) for value in self._compiled.inputs)
        self.outputs = tuple(_describe(value) for value in self._compiled.outputs)
        self._ports = {value.name: number for number, value in enumerate(self.outputs)}
        self._requests = threading.local()
        self.check_results: Callable[[], None] = lambda: None
        """Called after each batch. Raises if the results cannot be trusted."""

    def run(
        self, inputs: Inputs, output_names: Sequence[str], cancellation: Cancellation | None = None
    ) -> HostOutputs:
        """Compute the named outputs of a batch, in fp32. The next batch in this thread overwrites them."""
        request = self._request()
        self._infer(request, inputs, cancellation)
        outputs = {name: request.get_output_tensor(self._ports[name]).data for name in output_names}
        self.check_results()
        return HostOutputs(outputs, are_reused=True)

    def run_all(self, inputs: Inputs, limit: TimeLimit) -> dict[str, npt.NDArray[Any]]:
        """Compute all outputs of a batch with the graph's own data types."""
        request = self._request()
        self._infer(request, inputs, limit)
        return {
            value.name: request.get_output_tensor(port).data.copy()
            for value, port in zip(self.outputs, self._ports.values(), strict=True)
        }

    def _infer(self, request: "InferRequest", inputs: Inputs, cancellation: Cancellation | None) -> None:
        """Run a batch. Only an asynchronous run can be cancelled."""
        with cancellation.ending_with(request.cancel) if cancellation else nullcontext():
            request.start_async(feed_of(inputs, self.inputs), share_inputs=True)
            request.wait()

    def _request(self) -> "InferRequest":
        """Return the inference request of this thread. Creating one blocks until a stream is idle."""
        request: InferRequest | None = getattr(self._requests, "own", None)
        if request is None:
            request = self._requests.own = self._compiled.create_infer_request()
        return request


def _describe(value: Any) -> Value:  # noqa: ANN401 - openvino.ConstOutput, imported lazily
    element = value.get_element_type().get_type_name()
    shape = tuple(None if axis.is_dynamic else axis.get_length() for axis in value.get_partial_shape())
    name = value.get_node().get_friendly_name().removesuffix(_OUTPUT_SUFFIX)
    return Value(name, f"tensor({_ONNX_TYPES.get(element, element)})", shape)


def _compiled(
    compile_model: CompileModel,
    graph: Path,
    device: str,
    properties: dict[str, str],
    limit: TimeLimit | None,
) -> "CompiledModel":
    """Compile a graph, and verify its compute precision.

    Raises:
        StartupError: See `OpenvinoSession`.
    """
    try:
        compiled = _within(limit, lambda: compile_model(device, properties))
    except StartupError:
        raise
    except Exception as error:  # OpenVINO raises RuntimeError and its own classes
        raise StartupError(f"OpenVINO cannot open {graph} on {device}: {error}") from error
    found = compiled.get_property(_PRECISION).get_type_name()
    if found != properties[_PRECISION]:
        raise StartupError(
            f"OpenVINO computes {graph.name} in {found} on {device}, but {properties[_PRECISION]} was "
            "requested: use another --precision, or --engine onnxruntime"
        )
    return compiled


def _within(limit: TimeLimit | None, compile_graph: Callable[[], "CompiledModel"]) -> "CompiledModel":
    """Compile in a separate thread and abandon it on timeout, because OpenVINO cannot be interrupted.

    The abandoned thread ends when OpenVINO or the process ends, and its result is discarded.

    Raises:
        StartupError: The time limit has expired.
        Exception: `compile_graph` failed.
    """
    if limit is None:
        return compile_graph()
    over = threading.Event()
    results: list[CompiledModel] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(compile_graph())
        except BaseException as error:  # noqa: BLE001 - raised below, in the waiting thread
            errors.append(error)
        over.set()

    with limit.ending_with(over.set):
        threading.Thread(target=work, name="openvino-compile", daemon=True).start()
        over.wait()
    if errors:
        raise errors[0]
    if not results:
        raise StartupError("OpenVINO did not compile the graph in time")
    return results[0]
