"""Maximum length of functions."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = (
    "protos",
    "model",
    "export",
    "server",
    "client",
    "viewer",
    "cli",
    "analysis",
    "bulk",
    "bench",
    "docs",
    "examples",
    "tests",
)
MAX_FUNCTION_LINES = 60

GENERATED = ("_pb2.py", "_pb2_grpc.py")
PATHS = [
    path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
    if not path.name.endswith(GENERATED) and "node_modules" not in path.parts
]


def test_source_files_are_found() -> None:
    assert Path(__file__) in PATHS
    assert {path.relative_to(ROOT).parts[0] for path in PATHS} == set(ROOMS)


def test_no_function_is_too_long() -> None:
    long = [function for path in PATHS for function in _long_functions(path)]
    assert not long, "\n".join(long)


def _long_functions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines"
