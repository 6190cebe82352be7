"""A bundle in this process, as the comparison with the publisher's implementation needs it."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from attnlens.bundle import read_manifest
from attnlens_server import local


class ServedBundle:
    """The `attnlens_export.publisher.Embedder` of a bundle: the handlers of a server, without the network.

    Args:
        directory: The bundle.
        max_tokens: Longer texts are truncated, at the bundle's own limit if that is lower.

    Raises:
        StartupError: The bundle cannot be served.
    """

    def __init__(self, directory: Path, max_tokens: int) -> None:
        self.max_tokens = min(read_manifest(directory).max_tokens, max_tokens)
        self._model = local(directory, precision="fp32", max_tokens=self.max_tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._model.close()

    def encode(self, text: str, prompt_name: str | None) -> tuple[list[int], npt.NDArray[np.float32]]:
        """Return token ids (T,) and hidden states (T, D)."""
        [result] = self._model.encode([text], truncate=True, **_prompt(prompt_name))
        assert result.last_hidden_state is not None  # noqa: S101 - requested by default
        return [token.id for token in result.tokens], result.last_hidden_state

    def embed(self, text: str, prompt_name: str | None) -> npt.NDArray[np.float32]:
        """Return the final embedding (E,)."""
        vector: npt.NDArray[np.float32] = self._model.embed([text], truncate=True, **_prompt(prompt_name))[0]
        return vector


def _prompt(prompt_name: str | None) -> dict[str, Any]:
    return {"prompt": ""} if prompt_name is None else {"prompt_name": prompt_name}
