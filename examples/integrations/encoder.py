"""Client with the interface of SentenceTransformer. Requires only `attnlens`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens_client import Client

Array = npt.NDArray[Any]


class Encoder:
    """Embeds texts on an attnlens server and returns NumPy arrays.

    Long texts are truncated, as in sentence-transformers. With `truncate=False`, they raise an error.
    """

    similarity_fn_name = "cosine"

    def __init__(self, address: str = "127.0.0.1:50051", *, truncate: bool = True) -> None:
        self.client = Client(address)
        self.truncate = truncate
        self.model = self.client.get_model()
        self.prompts = dict(self.model.prompts)

    def encode(
        self,
        sentences: str | Sequence[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        convert_to_tensor: bool = False,
        batch_size: int = 32,  # noqa: ARG002 - controlled by the server, like the parameters below
        show_progress_bar: bool | None = None,  # noqa: ARG002
        convert_to_numpy: bool = True,  # noqa: ARG002
        device: str | None = None,  # noqa: ARG002
    ) -> Any:
        """Return float32 embeddings: (D,) for a string, (N, D) for a sequence."""
        texts = [sentences] if isinstance(sentences, str) else sentences
        vectors = self.client.embed(
            texts,
            prompt_name=prompt_name,
            prompt=prompt,
            normalize=True if normalize_embeddings else None,
            # sentence-transformers normalizes before truncation, and again only if requested.
            dimensions=truncate_dim if normalize_embeddings else None,
            truncate=self.truncate,
        )[:, :truncate_dim]
        result = vectors[0] if isinstance(sentences, str) else vectors
        if convert_to_tensor:
            import torch  # noqa: PLC0415 - only needed for tensors

            return torch.tensor(result)
        return result

    def encode_query(self, sentences: str | Sequence[str], **options: Any) -> Any:
        """Encode with the model's query prompt, if it has one."""
        return self.encode(sentences, **self._prompt(["query"], options))

    def encode_document(self, sentences: str | Sequence[str], **options: Any) -> Any:
        """Encode with the model's document prompt, if it has one."""
        return self.encode(sentences, **self._prompt(["document", "passage", "corpus"], options))

    def _prompt(self, names: list[str], options: dict[str, Any]) -> dict[str, Any]:
        if options.get("prompt") is not None or options.get("prompt_name") is not None:
            return options
        name = next((name for name in names if name in self.prompts), None)
        return options | ({"prompt": ""} if name is None else {"prompt_name": name})

    def similarity(self, a: Array, b: Array) -> Array:
        """Return the cosine similarities, (N, M), of the rows of `a` (N, D) and `b` (M, D)."""
        return np.asarray(_normalize(a) @ _normalize(b).T)

    def get_sentence_embedding_dimension(self) -> int:
        return self.model.embedding_size


def _normalize(vectors: Array) -> Array:
    """Return unit vectors of shape (N, D). Zero vectors are unchanged."""
    vectors = np.atleast_2d(vectors)
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12))
