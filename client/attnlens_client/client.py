"""The client for ordinary Python. `AsyncClient` is the same for asyncio."""
# ruff: noqa: D417 - the arguments are those of the plans

from collections.abc import Generator
from types import TracebackType
from typing import Self

from attnlens_client.connection import Connection
from attnlens_client.core import methods, plans
from attnlens_client.core.explanations import plans as explanation_plans
from attnlens_client.core.explanations.plans import ComparePlan, ExplainPlan
from attnlens_client.core.plans import EmbedIterPlan, EmbedPlan, EncodePlan, TokenizePlan
from attnlens_client.core.session import Session
from attnlens_client.drivers.blocking import Driver
from attnlens_client.drivers.steps import StepsDriver
from attnlens_client.explanations import Comparison, Explanation
from attnlens_client.model_info import ModelInfo
from attnlens_client.results import (
    Array,
    AttentionPart,
    Embeddings,
    EncodedText,
    TextPart,
    TokenizedText,
)
from attnlens_client.signatures import takes


class BlockingMethods:
    """What can be asked of a model by blocking calls, from any number of threads.

    `Client` asks a server, `attnlens_server.local` a model in this process. Each method makes as many calls
    as the limits make necessary, a few at a time, and returns results in the order of the texts. A text is a
    str, a pair of them (a tuple) that the model reads as one input, a sequence of token ids, or `TokenIds`.
    Texts are any iterable of them in order: a list, a generator, a column of pandas, polars or pyarrow, an
    array of numpy. Failures are the exceptions of `attnlens_client.errors`.
    """

    _driver: StepsDriver
    _session: Session

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is running, which raises AttnlensError there, and let nothing new start."""
        self._driver.close()

    @takes(plans.embed)
    def embed(self, plan: EmbedPlan) -> Array:
        """Return one vector for each text: shape (N, D), float32 unless `dtype` says otherwise.

        Args:
            texts: any number; of none the result has shape (0, D).
            pooling: how token vectors become one vector, before the model's dense layers. None: as the
                model does.
            normalize: scale each vector to length 1 at the end. None: as the model does.
            dimensions: keep the first components only, for models trained for it. None: all.
            prompt_name: the name of one of the model's prompts, put before each text and before the first of
                a pair. None: the default one.
            prompt: the prompt itself instead of a name; "" for none, not even the default one.
            truncate: cut a text that is too long, rather than raise InputTooLongError.
            dtype: the element type on the way and of the result.
            model: the model's name. Empty: the server's only one.
            progress: True shows a bar (tqdm's where it is installed, else a line on a terminal's stderr). A
                function is called with the texts that are done and all of them: first with 0, then after
                each reply.

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
        """Return the vectors, the tokens of each text and the model's version. See `embed`.

        >>> client.embed_with_usage(["Hello, world!"]).usages
        (Usage(num_tokens=6, num_tokens_total=6, truncated=False),)
        """
        return self._driver.result(methods.run(self._session, plan))

    @takes(plans.embed_iter)
    def embed_iter(self, plan: EmbedIterPlan) -> Generator[Embeddings]:
        """Yield the vectors of any number of texts, a batch at a time, in the order of the texts.

        Reads the texts while it goes, in the calling thread, and holds `in_flight` batches in memory at most.
        It reads no further while the consumer takes no batch. To stop early, `close()` the iterator or let go
        of it.

        Args:
            texts: any iterable, an endless one included; of none nothing is yielded. An entry that is wrong
                raises when it is read, `in_flight` batches ahead of what is yielded.
            batch_size: the most texts of a batch. It has fewer at the end, and where the server's limits ask
                for it. None: that of the client.
            in_flight: the batches that are asked for at a time. None: `max_in_flight` of the client.
            pooling, normalize, dimensions, prompt_name, prompt, truncate, dtype, model: as in `embed`.
            progress: as in `embed`; the number of all texts is None where `texts` has no length.

        Raises:
            As `embed`. BadReplyError, too, where the model is replaced on the way.

        >>> for batch in client.embed_iter((f"text {number}" for number in range(300)), batch_size=128):
        ...     print(batch.vectors.shape)
        (128, 384)
        (128, 384)
        (44, 384)

        To iterate over a batch is to iterate over its vectors:

        >>> vectors = itertools.chain.from_iterable(client.embed_iter(["It rained.", "It was wet."]))
        >>> [vector.shape for vector in vectors]
        [(384,), (384,)]
        """
        return self._driver.items(methods.embed_iter(self._session, plan))

    @takes(plans.encode)
    def encode(self, plan: EncodePlan) -> list[EncodedText]:
        """Return tokens, token vectors (T, D) and what `attention` asks for of each text.

        Args:
            texts: any number.
            attention: what to return of the attention: an `AttentionQuery`, or a list of several views of one
                run. None: nothing.
            last_hidden_state: Whether to return the token vectors of the last layer.
            prompt_name, prompt: as in `embed`.
            truncate: cut a text that is too long, rather than raise InputTooLongError.
            dtype: the element type on the way and of the result.
            model: the model's name. Empty: the server's only one.

        Raises:
            TypeError, ValueError: an argument is wrong whatever the server.
            InputTooLongError: a text is too long and `truncate` is not set.
            ResponseTooLargeError: the result of one text is over the server's limit: use `encode_stream`.
            BadReplyError: the server's reply is not what was asked for.
            AttnlensError: the call failed.

        >>> [text] = client.encode(["It rained."], attention=AttentionQuery(layers=[-1], view="head_mean"))
        >>> [token.text for token in text.tokens]
        ['[CLS]', 'it', 'rained', '.', '[SEP]']
        >>> text.last_hidden_state.shape, text.weights.shape, text.attention[0].layers
        ((5, 384), (1, 1, 5, 5), (5,))

        Several queries are answered in their order:

        >>> queries = [AttentionQuery(layers=[0], heads=[3, 4]), AttentionQuery(view="head_mean")]
        >>> [text] = client.encode(["It rained."], attention=queries, last_hidden_state=False)
        >>> [attention.weights.shape for attention in text.attention]
        [(1, 2, 5, 5), (6, 1, 5, 5)]
        """
        return self._driver.result(methods.run(self._session, plan))

    @takes(plans.encode)
    def encode_stream(self, plan: EncodePlan) -> Generator[EncodedText]:
        """Yield what `encode` returns, one text at a time, whatever its size.

        Holds one text in memory. To stop early, `close()` the iterator or let go of it. The arguments are
        those of `encode`.

        Raises:
            As `encode`, but never ResponseTooLargeError: here a layer is a message.

        >>> for text in client.encode_stream(["It rained.", "It was wet."], attention=AttentionQuery()):
        ...     print(text.num_tokens, text.weights.shape)
        5 (6, 12, 5, 5)
        6 (6, 12, 6, 6)
        """
        return self._driver.items(methods.encode_stream(self._session, plan))

    @takes(plans.encode)
    def encode_stream_parts(self, plan: EncodePlan) -> Generator[TextPart | AttentionPart]:
        """Yield a `TextPart` for each text, then an `AttentionPart`, (H', T, T), for each layer and query.

        Only one layer is in memory at a time. Takes the arguments of `encode` and raises the errors of
        `encode_stream`.

        >>> for part in client.encode_stream_parts(["It rained."], attention=AttentionQuery(layers=[0, -1])):
        ...     match part:
        ...         case TextPart():
        ...             print(part.text.num_tokens)
        ...         case AttentionPart():
        ...             print(part.layer, part.weights.shape)
        5
        0 (12, 5, 5)
        5 (12, 5, 5)
        """
        return self._driver.items(methods.encode_stream_parts(self._session, plan))

    @takes(plans.tokenize)
    def tokenize(self, plan: TokenizePlan) -> list[TokenizedText]:
        """Return all tokens of each text, whatever the model's limit, without running the model.

        The arguments are those of `embed`.

        >>> [token.text for token in client.tokenize(["unbelievable!"])[0].tokens]
        ['[CLS]', 'unbelievable', '!', '[SEP]']
        """
        return self._driver.result(methods.run(self._session, plan))

    @takes(explanation_plans.explain)
    def explain(self, plan: ExplainPlan) -> list[Explanation]:
        """Return what each token of each text did for its embedding, or for a similarity.

        The target is d . p / |p|, p being the embedding that `embed` returns. Scores of `contributions` and
        their baseline add up to it. docs/explanations.md says what each method means, and what it does not.

        Args:
            texts: any number.
            to: a text: d is its embedding, scaled to length 1, so that the target is the cosine. None: d is
                each text's own, and the target 1.
            rather_than: another text: d is the difference of the two embeddings, so that the target is the
                difference of two cosines. Why is a text nearer to the one than to the other?
            direction: d itself, a vector of as many numbers as the embedding has. It is not scaled.
            methods: one or several of "contributions", "output_share", "leave_one_out" (one run of the model
                per token), "rollout", "received_attention", "contribution_norm" (one run of the graph of
                contributions per component of the embedding).
            level: "tokens", or "words": the sums over the tokens of each word.
            head_contributions: return what each head contributes, too.
            pooling, dimensions, prompt_name, prompt, truncate, model: as in `embed`.
            target_prompt_name, target_prompt: the prompt of `to` and `rather_than`.

        Raises:
            TypeError, ValueError: an argument is wrong whatever the server.
            NotSupportedError: the bundle lacks what a method needs, see `ModelInfo.explain_methods`.
            RequestTooExpensiveError: a text needs more runs of the model than the server makes.
            BadReplyError: the server's reply is not what was asked for, or does not add up.
            AttnlensError: the call failed.

        >>> [text] = client.explain(["The animal didn't cross the street because it was too tired."])
        >>> [(token, round(score, 4)) for token, score in text.top(2)]
        [('animal', 0.2813), ('street', 0.1575)]
        >>> scores = text.by("contributions")
        >>> round(scores.baseline, 4), round(scores.sum, 4), round(text.target_value, 4)
        (0.0825, 1.0, 1.0)

        Why is this text nearer to the one than to the other?

        >>> [text] = client.explain(["A man plays the guitar."], to="music", rather_than="sports")
        >>> text.top(1)[0][0]
        'guitar'
        """
        return self._driver.result(methods.run(self._session, plan))

    @takes(explanation_plans.compare)
    def compare(self, plan: ComparePlan) -> Comparison:
        """Return what each token of two texts did for the cosine of their embeddings.

        Args:
            a, b: the texts.
            matrix: "output": the similarity of all pairs of token vectors, whose sum is the cosine;
                "interaction": what the cosine loses without both tokens beyond what it loses without each, a
                run of the model for each token; "input": what the input tokens of both contribute together,
                whose sum with `baseline_row`, `baseline_column` and `baseline` is the cosine, a run for each
                component of an embedding. None: nothing.
            methods, level, head_contributions: as in `explain`, for each text towards the other one.
            pooling, dimensions, truncate, model: as in `embed`.
            prompt_name_a, prompt_a, prompt_name_b, prompt_b: the prompts of the two texts.

        Raises:
            As `explain`.

        >>> a, b = "A man is playing a guitar.", "Someone plays an instrument."
        >>> pair = client.compare(a, b, matrix="interaction")
        >>> round(pair.similarity, 4), pair.top_pairs(1)[0][:2]
        (0.6674, ('guitar', 'instrument'))
        >>> [token for token, _ in pair.a.top(2)], [token for token, _ in pair.b.top(2)]
        (['guitar', 'playing'], ['instrument', 'plays'])
        """
        return self._driver.result(methods.compare(self._session, plan))

    def get_model(self, name: str = "") -> ModelInfo:
        """Return version, state, sizes, limits and parity figures of a model; "" is the server's only one.

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


class Client(Connection, BlockingMethods):
    """A connection to an attnlens server. Its methods are those of `BlockingMethods`.

    >>> with Client(address) as client:
    ...     client.embed(["The cat sat.", "It rained."]).shape
    (2, 384)
    """

    _driver: Driver

    def __post_init__(self) -> None:
        super().__post_init__()
        self._driver = Driver(self)
