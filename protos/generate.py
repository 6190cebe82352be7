"""Generates Python stubs for all .proto files: `python protos/generate.py [OUTPUT_DIR]`.

By default, stubs are written next to the .proto files. `make protos` runs this script. A test compares its
output with the committed stubs.
"""

import subprocess
import sys
from pathlib import Path

PROTO_ROOT = Path(__file__).resolve().parent
# Client libraries such as tritonclient register their own copy of this package in the default pool, which
# rejects a second one.
OWN_POOL = "attnlens/oip/open_inference_pb2.py"


def generate(output_dir: Path) -> None:
    """Write `*_pb2.py`, `*_pb2_grpc.py` and their type stubs to `output_dir`."""
    protos = sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.glob("attnlens/**/*.proto"))
    plugin_dir = Path(sys.executable).parent
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"--proto_path={PROTO_ROOT}",
        f"--plugin=protoc-gen-mypy={plugin_dir / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={plugin_dir / 'protoc-gen-mypy_grpc'}",
        f"--python_out={output_dir}",
        f"--grpc_python_out={output_dir}",
        f"--mypy_out=quiet:{output_dir}",
        f"--mypy_grpc_out=quiet:{output_dir}",
        *protos,
    ]
    subprocess.run(command, check=True)
    for path in output_dir.glob("attnlens/**/*_pb2_grpc.py"):
        if "class " not in path.read_text(encoding="utf-8"):  # .proto files without a service
            path.unlink()
            path.with_suffix(".pyi").unlink()
    stub = output_dir / OWN_POOL
    default, own = "_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()"
    stub.write_text(stub.read_text(encoding="utf-8").replace(default, own), encoding="utf-8")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTO_ROOT)
