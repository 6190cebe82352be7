"""Performance ceiling: ONNX Runtime's fp32 MatMul at the model's shapes, for 512 tokens.

python -m bench.matmul THREADS
"""

import sys
import time

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnxruntime

from bench.lines import Response, serve_lines

FLOPS_PER_RUN = 40e9  # about 0.1 s on two cores


def main() -> None:
    threads = int(sys.argv[1])
    sessions: dict[tuple[int, int, int], onnxruntime.InferenceSession] = {}

    def handle(m: int, k: int, n: int) -> Response:
        """Time repeated products of (M, K) with a constant (K, N), after one warm-up run."""
        if (m, k, n) not in sessions:
            sessions[m, k, n] = open_matmul(k, n, threads)
        session = sessions[m, k, n]
        inputs = {"x": np.random.default_rng(0).standard_normal((m, k), dtype=np.float32)}
        session.run(None, inputs)
        flops, repetitions = 2 * m * k * n, max(1, round(FLOPS_PER_RUN / (2 * m * k * n)))
        started = time.perf_counter()
        for _ in range(repetitions):
            session.run(None, inputs)
        return {"seconds": time.perf_counter() - started, "flops": flops * repetitions}

    serve_lines(handle, versions={"onnxruntime": onnxruntime.__version__})


def open_matmul(k: int, n: int, threads: int) -> onnxruntime.InferenceSession:
    """Open a graph with one MatMul. The weights are constant so that ONNX Runtime prepacks them."""
    weights = np.random.default_rng(1).standard_normal((k, n), dtype=np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "weights"], ["y"])],
        "matmul",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["m", k])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["m", n])],
        [onnx.numpy_helper.from_array(weights, "weights")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


if __name__ == "__main__":
    main()
