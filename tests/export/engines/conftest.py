"""Fewer texts, which are sufficient for small encoders."""

import pytest

from attnlens_export.engines import texts
from attnlens_export.int8.texts import read_kinds


@pytest.fixture(autouse=True)
def fewer_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every eighth text of each kind."""
    kinds = {kind: lines[::8] for kind, lines in read_kinds(None).items()}
    monkeypatch.setattr(texts, "read_kinds", lambda _path: kinds)
