"""Inference runtimes: ONNX Runtime and OpenVINO. Only the configured one is imported.

`runtime` defines the interface. `onnx_runtime` and `openvino_runtime` open graphs, `onnx_session` and
`openvino_session` run them, and `device` reads attention weights from GPU memory.
"""
