"""A model that is ready to serve, with everything that belongs to one version of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from attnlens.dense import DenseLayer
from attnlens_server.bundle import Model
from attnlens_server.config import ServerConfig
from attnlens_server.core.execution import ItemRunner
from attnlens_server.core.reply_costs import ReplyCosts
from attnlens_server.engine import Engine
from attnlens_server.errors import ModelNotFoundError
from attnlens_server.text import TextEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """One version of one model. Immutable.

    Attributes:
        spec: Name, sizes, outputs and settings of the model.
        config: Configuration.
        max_tokens: Maximum input length in tokens, special tokens included.
        text_encoder: Tokenizer. None if the bundle has none.
        dense: Dense layers after the pooling.
        precision: Precision of embeddings.
        engine: Runs the graphs.
        runner: Runs items in the engine.
        costs: Sizes of replies.
    """

    spec: Model
    config: ServerConfig
    max_tokens: int
    text_encoder: TextEncoder | None
    dense: Sequence[DenseLayer]
    precision: str
    engine: Engine
    runner: ItemRunner
    costs: ReplyCosts

    @property
    def max_inputs(self) -> int:
        """Maximum number of texts of a request."""
        return self.config.max_inputs_per_request

    @property
    def takes_pairs(self) -> bool:
        """Whether an input may be a pair of texts."""
        return bool(self.spec.takes_pairs and self.text_encoder and self.text_encoder.takes_pairs)

    @property
    def truncation_side(self) -> str:
        """Side of a long text that truncation removes, "left" or "right"."""
        return self.text_encoder.truncation_side if self.text_encoder else "right"

    def check_name(self, name: str, version: str) -> None:
        """Check that a request is for this model. An empty name or version matches any model.

        Raises:
            ModelNotFoundError: The name or the version is different.
        """
        spec = self.spec
        if name not in ("", spec.name) or version not in ("", spec.version):
            raise ModelNotFoundError(name or spec.name, spec.name, version, spec.version)
