"""The client for ordinary Python. `AsyncClient` is the same for asyncio."""
# ruff: noqa: D417 - the arguments are those of the plans

from collections.abc import Generator
from types import TracebackType
from typing import Self

from attnlens_client.arguments import takes
from attnlens_client.connection import Connection
from attnlens_client.core import methods, plans
from attnlens_client.core.plans import EmbedPlan, EncodePlan, TokenizePlan
from attnlens_client.driver import Driver
from attnlens_client.results import (
    Array,
    Embeddings,
    EncodedText,
    HeadPart,
    LayerPart,
    ModelInfo,
    TokenizedText,
)


class Client(Connection):
    """A connection to an attnlens server, for use from any number of threads.

    Each method sends as many calls as the server's limits make necessary, a few at a time, and
    returns results in the order of the texts. A text is a str or a sequence of token ids. Failures
    are the exceptions of `attnlens_client.errors`.

    >>> with Client(address) as client:
    ...     client.embed(["The cat sat.", "It rained."]).shape
    (2, 384)
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._driver = Driver(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is running, which raises AttnlensError there, and close the connection."""
        self._driver.close()

    @takes(plans.embed)
    def embed(self, plan: EmbedPlan) -> Array:
        """Return one vector for each text: shape (N, D), float32 unless `dtype` says otherwise.

        Args:
            texts: any number, each a str or a sequence of token ids; of none the result has shape (0, D).
            pooling: how token vectors become one vector, before the model's dense layers. None: as the
                model does.
            normalize: scale each vector to length 1 at the end. None: as the model does.
            dimensions: keep the first components only, for models trained for it. None: all.
            prompt_name: the name of one of the model's prompts, put before each text. None: the default one.
            prompt: the prompt itself instead of a name; "" for none, not even the default one.
            truncate: cut a text that is too long, rather than raise InputTooLongError.
            dtype: the element type on the way and of the result.
            model: the model's name. Empty: the server's only one.

        Raises:
            TypeError, ValueError: an argument is wrong whatever the server.
            InputTooLongError: a text is too long and `truncate` is not set.
            BadReplyError: the server's reply is not what was asked for.
            AttnlensError: the call failed.

        >>> client.embed(["Ottawa is in Canada."], normalize=True, dtype="float16").dtype
        dtype('float16')
        """
        return self._driver.result(methods.run(self._session, plan)).vectors

    @takes(plans.embed)
    def embed_with_usage(self, plan: EmbedPlan) -> Embeddings:
        """Return the vectors together with the number of tokens of each text. See `embed`.

        >>> client.embed_with_usage(["Hello, world!"]).usages
        (Usage(num_tokens=6, num_tokens_total=6, truncated=False),)
        """
        return self._driver.result(methods.run(self._session, plan))

    @takes(plans.encode)
    def encode(self, plan: EncodePlan) -> list[EncodedText]:
        """Return tokens, token vectors (T, D) and attention weights (L', H', T, T) for each text.

        Args:
            texts: any number, each a str or a sequence of token ids.
            layers: the layers whose attention to return, in this order; -1 is the last. None: all.
            heads: the heads to return; -1 is the last. None: all.
            head_reduction: "mean" averages the chosen heads into an axis of length 1.
            hidden_states: return the token vectors of the last layer.
            attentions: return the attention weights.
            truncate: cut a text that is too long, rather than raise InputTooLongError.
            dtype: the element type on the way and of the result.
            model: the model's name. Empty: the server's only one.

        Raises:
            TypeError, ValueError: an argument is wrong whatever the server.
            InputTooLongError: a text is too long and `truncate` is not set.
            ResponseTooLargeError: the result of one text is over the server's limit: use `stream`.
            BadReplyError: the server's reply is not what was asked for.
            AttnlensError: the call failed.

        >>> [text] = client.encode(["It rained."], layers=[-1], head_reduction="mean")
        >>> [token.text for token in text.tokens]
        ['[CLS]', 'it', 'rained', '.', '[SEP]']
        >>> text.hidden_states.shape, text.attentions.shape, text.layers
        ((5, 384), (1, 1, 5, 5), (5,))
        """
        return self._driver.result(methods.run(self._session, plan))

    @takes(plans.encode)
    def stream(self, plan: EncodePlan) -> Generator[EncodedText]:
        """Yield what `encode` returns, one text at a time, whatever its size.

        Holds one text in memory. To stop early, `close()` the iterator or let go of it. The arguments are
        those of `encode`.

        Raises:
            As `encode`, but never ResponseTooLargeError: here a layer is a message.

        >>> for text in client.stream(["It rained.", "It was wet."]):
        ...     print(text.num_tokens, text.attentions.shape)
        5 (6, 12, 5, 5)
        6 (6, 12, 6, 6)
        """
        return self._driver.items(methods.stream(self._session, plan))

    @takes(plans.encode)
    def stream_parts(self, plan: EncodePlan) -> Generator[HeadPart | LayerPart]:
        """Yield for each text its head, then its attention weights layer by layer, (H', T, T) each.

        Holds one layer in memory. The arguments are those of `encode`, the failures those of `stream`.

        >>> for part in client.stream_parts(["It rained."], layers=[0, -1]):
        ...     match part:
        ...         case HeadPart():
        ...             print(part.text.num_tokens)
        ...         case LayerPart():
        ...             print(part.layer, part.weights.shape)
        5
        0 (12, 5, 5)
        5 (12, 5, 5)
        """
        return self._driver.items(methods.stream_parts(self._session, plan))

    @takes(plans.tokenize)
    def tokenize(self, plan: TokenizePlan) -> list[TokenizedText]:
        """Return all tokens of each text, whatever the model's limit, without running the model.

        >>> [token.text for token in client.tokenize(["unbelievable!"])[0].tokens]
        ['[CLS]', 'unbelievable', '!', '[SEP]']
        """
        return self._driver.result(methods.run(self._session, plan))

    def get_model(self, name: str = "") -> ModelInfo:
        """Return sizes, limits, parity figures and versions of a model; "" is the server's only one.

        >>> model = client.get_model()
        >>> model.hidden_size, model.num_layers, model.num_heads, model.pooling
        (384, 6, 12, 'mean')
        """
        return self._driver.result(methods.get_model(self._session, name))

    def list_models(self) -> list[ModelInfo]:
        """Return the models that the server holds.

        >>> len(client.list_models())
        1
        """
        return self._driver.result(methods.list_models(self._session))
