"""ONNX Runtime for Node.js, the npm package onnxruntime-node."""

from attnlens_runtimes.runtime import NodeRuntime

RUNTIME = NodeRuntime("onnxruntime-node")
