"""Exports one small encoder with random weights per family and mechanism, for the tests on a GPU.

PYTHONPATH=tests:. python tests/cuda/make_bundles.py DIRECTORY
CUDA_BUNDLES=DIRECTORY make test-cuda
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from attnlens_export import ExportOptions, export_bundle
from attnlens_export.parity.grid import small_grid
from family_cases import EXPORTED
from mechanisms import LAYERS, mechanism_config


def main() -> None:
    directory = Path(sys.argv[1])
    for mechanism in LAYERS:
        export(mechanism_config(mechanism), directory / f"attnlens-{mechanism}", seed=3)
    for family, model in EXPORTED.items():
        with tempfile.TemporaryDirectory() as source:
            model.make().save_pretrained(source)
            export(source, directory / family.replace(" ", "_"), pooling="mean")


def export(source: Any, bundle: Path, **options: Any) -> None:
    export_bundle(source, bundle, ExportOptions(grid=small_grid(16), faithfulness=False, **options))
    print(bundle)


if __name__ == "__main__":
    main()
