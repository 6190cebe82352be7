"""Import rules: each package is imported in a new interpreter."""

import subprocess
import sys

import pytest

RULES = {
    "attnlens_server.server": {
        "torch",
        "transformers",
        "onnx",
        "attnlens_model",
        "attnlens_export",
        "attnlens_client",
    },
    "attnlens_client": {
        "torch",
        "onnxruntime",
        "tokenizers",
        "click",
        "rich",
        "google.rpc",
        "attnlens_server",
        "attnlens_viewer",
        "anywidget",
        "IPython",
    },
    "attnlens_model": {
        "onnx",
        "onnxruntime",
        "grpc",
        "attnlens_export",
        "attnlens_server",
        "attnlens_client",
    },
    "attnlens_analysis.heads": {
        "torch",
        "transformers",
        "onnx",
        "click",
        "rich",
        "attnlens_model",
        "attnlens_export",
        "attnlens_client",
    },
    "attnlens_publisher.process": {"numpy", "torch", "transformers", "attnlens_model", "attnlens_export"},
    "attnlens_runtimes": {
        "torch",
        "onnx",
        "onnxruntime",
        "openvino",
        "attnlens_model",
        "attnlens_export",
    },
    "attnlens_export": {"grpc", "attnlens_server", "attnlens_client"},
    "attnlens_viewer": {
        "attnlens",
        "attnlens_client",
        "attnlens_server",
        "click",
        "grpc",
        "matplotlib",
        "torch",
    },
    "attnlens_cli.main": {"torch", "onnx", "onnxruntime", "grpc", "numpy", "tokenizers"},
    "attnlens.bundle": {"numpy", "grpc"},
}


@pytest.mark.parametrize("package", RULES)
def test_package_imports_only_allowed_packages(package: str) -> None:
    program = f"import sys, {package}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert RULES[package].isdisjoint(loaded.stdout.split())


def test_client_loads_three_libraries() -> None:
    program = (
        "import sys; before = set(sys.modules); import attnlens_client; print(*set(sys.modules) - before)"
    )
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    packages = {name.partition(".")[0] for name in loaded.stdout.split()}
    others = {name for name in packages - sys.stdlib_module_names if not name.startswith(("_", "cython"))}
    # gRPC imports its optional packages: grpc_health, grpc_reflection, grpc_tools.
    libraries = {"grpc" if name.startswith("grpc_") else name for name in others}
    assert libraries == {"attnlens", "attnlens_client", "google", "grpc", "numpy", "typing_extensions"}
