"""The notebooks in examples/ run completely with a real server, and are stored without outputs."""

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from served import ServerProcess

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))
# Expected text in a result of each notebook.
RESULTS = {
    "attention_and_explanations": "('guitar', 'instrument'",
    "attention_pitfalls": "no causal mask: 0.",
    "first_steps": "num_tokens=256, num_tokens_total=1002, truncated=True",
    "search_with_reasons": "0.5868 Choose a new password",
}


@pytest.mark.extended
# The kernel is a separate process. Ignore warnings of its libraries.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom(
    path: Path, minilm_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNLENS_ADDRESS", minilm_server.address)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs: list[Any] = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = "\n".join(output.get("text") or output["data"]["text/plain"] for output in outputs)
    assert RESULTS[path.stem] in shown
    assert all(output.get("name") != "stderr" for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in cells] == [([], None)] * len(cells)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


def test_every_notebook_has_an_expected_result() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(RESULTS)
