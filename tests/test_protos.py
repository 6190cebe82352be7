"""Compares the committed stubs with the .proto files."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

PROTOS = Path(__file__).parents[1] / "protos"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = spec_from_file_location("generate", PROTOS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    output = tmp_path_factory.mktemp("stubs")
    module.generate(output)
    return output


def test_stubs_match_the_proto_files(generated: Path) -> None:
    fresh = {path.relative_to(generated) for path in generated.rglob("*.py*")}
    checked_in = {path.relative_to(PROTOS) for path in PROTOS.rglob("*_pb2*.py*") if path.suffix != ".pyc"}
    assert fresh == checked_in
    for path in fresh:
        assert (generated / path).read_text() == (PROTOS / path).read_text(), f"{path}: run `make protos`"
