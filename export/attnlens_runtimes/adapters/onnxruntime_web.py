"""ONNX Runtime as WebAssembly, the npm package onnxruntime-web, in Node.js instead of a browser."""

from attnlens_runtimes.runtime import NodeRuntime

RUNTIME = NodeRuntime("onnxruntime-web")
