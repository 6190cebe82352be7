"""What runs graphs: ONNX Runtime or OpenVINO, each loaded when it is chosen.

`runtime` is what the engine knows of both. `onnx_runtime`, with its sessions in `onnx_session` and `device`
(where attention stays on a GPU), is one of them; `openvino_runtime` and `openvino_session` are the other.
`choice` picks one.
"""
