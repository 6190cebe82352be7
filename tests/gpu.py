"""Marks of the tests that need an NVIDIA GPU."""

import ctypes

import onnxruntime
import pytest

from attnlens_server.engine.runtimes.onnx_session import CUDA


def has_gpu() -> bool:
    """Return whether ONNX Runtime has CUDA and the driver finds a GPU."""
    if CUDA not in onnxruntime.get_available_providers():
        return False
    try:
        return bool(ctypes.CDLL("libcuda.so.1").cuInit(0) == 0)
    except OSError:
        return False


needs_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not has_gpu(), reason="needs onnxruntime-gpu and an NVIDIA GPU"),
]
