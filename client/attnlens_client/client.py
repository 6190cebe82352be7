"""Synchronous client."""
# ruff: noqa: D417 - the arguments are those of the plans

from collections.abc import Generator
from types import TracebackType
from typing import Self

from attnlens_client.connection import Connection
from attnlens_client.core import calls, plans, scoring
from attnlens_client.core.calls import Session
from attnlens_client.core.plans import (
    ComparePlan,
    EmbedIterPlan,
    EmbedPlan,
    EncodePlan,
    ExplainPlan,
    TokenizePlan,
    takes,
)
from attnlens_client.core.scoring import ClassifyPlan, RerankPlan, ScorePlan
from attnlens_client.drivers.blocking import Driver, StepsDriver
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
from attnlens_client.scores import Classification, RankedDocument, Scores


class BlockingMethods:
    """Blocking methods of `Client` and of models in this process (`attnlens_server.local`). Thread-safe.

    Requests are split into several calls where the server's limits require it. Results are in the order of
    the texts. A text is a str, a tuple of two str for one input of the model, a sequence of token ids, or
    `TokenIds`. Texts are any ordered iterable: a list, a generator, a column of pandas, polars or pyarrow, or
    a NumPy array. Errors are described in `attnlens_client.errors`.
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
        """Close the connection. Running calls raise AttnlensError."""
        self._driver.close()

    @takes(plans.embed)
    def embed(self, plan: EmbedPlan) -> Array:
        """Return embeddings (N, D).

        Args:
            texts: Texts. The result for no texts has the shape (0, D).
            pooling: Pooling of the token vectors, before the model's dense layers. If None, the model's
                default.
            normalize: Whether to normalize embeddings to length 1. If None, the model's default.
            dimensions: Number of components to keep, for models trained for it. If None, all.
            prompt_name: Name of one of the model's prompts, which precedes each text and the first text of
                each pair. If None, the default prompt.
            prompt: Text of the prompt, instead of a name. "" for no prompt.
            truncate: Whether to truncate long texts instead of raising InputTooLongError.
            dtype: Data type of the response and the result, "float32" or "float16".
            embedding_type: Quantization, as by `quantize_embeddings` of sentence-transformers: "float" for
                none, "int8" or "uint8" for one byte per component, "binary" (int8) or "ubinary" (uint8) for
                one bit per component, in an array (N, ceil(D / 8)).
            ranges: Minimum and maximum (2, D) of each component for "int8" and "uint8". If None, those that
                the export measured. They need the default pooling, normalize and dimensions.
            model: Model name. If empty, the default model.
            progress: If True, show a progress bar with tqdm, or a line on stderr if tqdm is not installed. A
                function is called with the number of completed texts and the total, first with 0 and then
                after each reply.

        Raises:
            TypeError, ValueError: An argument is invalid for any server.
            InputTooLongError: A text is too long and `truncate` is not set.
            BadReplyError: The reply is invalid.
            AttnlensError: A call failed.

        >>> client.embed(["Ottawa is in Canada."], normalize=True, dtype="float16").dtype
        dtype('float16')
        >>> client.embed(["Ottawa is in Canada."], embedding_type="ubinary").shape
        (1, 48)
        """
        return self._driver.result(calls.run(self._session, plan)).vectors

    @takes(plans.embed)
    def embed_with_usage(self, plan: EmbedPlan) -> Embeddings:
        """Return embeddings with the number of tokens of each text and the model version.

        Arguments and errors are those of `embed`.

        >>> client.embed_with_usage(["Hello, world!"]).usages
        (Usage(num_tokens=6, num_tokens_total=6, truncated=False),)
        """
        return self._driver.result(calls.run(self._session, plan))

    @takes(plans.embed_iter)
    def embed_iter(self, plan: EmbedIterPlan) -> Generator[Embeddings]:
        """Yield the embeddings of any number of texts in batches, in the order of the texts.

        Texts are read lazily in the calling thread, at most `in_flight` batches ahead. To stop early, call
        `close()` on the iterator or delete it.

        Args:
            texts: Any iterable, which may be endless. An invalid text raises an error when it is read.
            batch_size: Maximum number of texts per batch. Batches are smaller at the end, and if the server's
                limits require it. If None, that of the client.
            in_flight: Maximum number of concurrent calls. If None, `max_in_flight` of the client.
            pooling, normalize, dimensions, prompt_name, prompt, truncate, dtype: See `embed`.
            embedding_type, ranges, model: See `embed`.
            progress: See `embed`. The total is None if `texts` has no length.

        Raises:
            TypeError, ValueError, InputTooLongError, AttnlensError: See `embed`.
            BadReplyError: The reply is invalid, or the model was replaced between two calls.

        >>> for batch in client.embed_iter((f"text {number}" for number in range(300)), batch_size=128):
        ...     print(batch.vectors.shape)
        (128, 384)
        (128, 384)
        (44, 384)

        Iterating over a batch yields its vectors:

        >>> vectors = itertools.chain.from_iterable(client.embed_iter(["It rained.", "It was wet."]))
        >>> [vector.shape for vector in vectors]
        [(384,), (384,)]
        """
        return self._driver.items(calls.embed_iter(self._session, plan))

    @takes(plans.encode)
    def encode(self, plan: EncodePlan) -> list[EncodedText]:
        """Return tokens, token vectors (T, D) and attention of each text.

        Args:
            texts: Texts.
            attention: One or several `AttentionQuery`, answered by one run of the model. If None, no
                attention is returned.
            last_hidden_state: Whether to return the token vectors of the last layer.
            prompt_name, prompt, truncate, dtype, model: See `embed`.

        Raises:
            TypeError, ValueError: An argument is invalid for any server.
            InputTooLongError: A text is too long and `truncate` is not set.
            ResponseTooLargeError: The result of one text exceeds the server's limit. Use `encode_stream`.
            BadReplyError: The reply is invalid.
            AttnlensError: A call failed.

        >>> [text] = client.encode(["It rained."], attention=AttentionQuery(layers=[-1], view="head_mean"))
        >>> [token.text for token in text.tokens]
        ['[CLS]', 'it', 'rained', '.', '[SEP]']
        >>> text.last_hidden_state.shape, text.weights.shape, text.attention[0].layers
        ((5, 384), (1, 1, 5, 5), (5,))

        Results of several queries are in their order:

        >>> queries = [AttentionQuery(layers=[0], heads=[3, 4]), AttentionQuery(view="head_mean")]
        >>> [text] = client.encode(["It rained."], attention=queries, last_hidden_state=False)
        >>> [attention.weights.shape for attention in text.attention]
        [(1, 2, 5, 5), (6, 1, 5, 5)]
        """
        return self._driver.result(calls.run(self._session, plan))

    @takes(plans.encode)
    def encode_stream(self, plan: EncodePlan) -> Generator[EncodedText]:
        """Yield the results of `encode` one text at a time, of any size.

        Keeps one text in memory. To stop early, call `close()` on the iterator or delete it. Arguments and
        errors are those of `encode`. Each layer is a message of its own, so only a single layer can exceed
        the server's limit.

        >>> for text in client.encode_stream(["It rained.", "It was wet."], attention=AttentionQuery()):
        ...     print(text.num_tokens, text.weights.shape)
        5 (6, 12, 5, 5)
        6 (6, 12, 6, 6)
        """
        return self._driver.items(calls.encode_stream(self._session, plan))

    @takes(plans.encode)
    def encode_stream_parts(self, plan: EncodePlan) -> Generator[TextPart | AttentionPart]:
        """Yield for each text a `TextPart`, then an `AttentionPart` (H', T, T) for each query and layer.

        Keeps one layer in memory. Arguments and errors are those of `encode_stream`.

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
        return self._driver.items(calls.encode_stream_parts(self._session, plan))

    @takes(plans.tokenize)
    def tokenize(self, plan: TokenizePlan) -> list[TokenizedText]:
        """Return all tokens of each text, without truncation and without running the model.

        Arguments and errors are those of `embed`.

        >>> [token.text for token in client.tokenize(["unbelievable!"])[0].tokens]
        ['[CLS]', 'unbelievable', '!', '[SEP]']
        """
        return self._driver.result(calls.run(self._session, plan))

    @takes(plans.explain)
    def explain(self, plan: ExplainPlan) -> list[Explanation]:
        """Return the contribution of each token to the embedding of its text, or to a similarity.

        The target value is d . p / |p| for the embedding p of the text and a direction d. Scores of
        `contributions` and their baseline add up to it. docs/explanations.md describes the methods and their
        limits.

        Args:
            texts: Texts.
            to: Text whose normalized embedding is d, so that the target value is a cosine similarity. If
                None, each text's own embedding, whose target value is 1.
            rather_than: Second text. d is the difference of the two normalized embeddings, which explains why
                a text is closer to `to` than to `rather_than`. With `label`, another label, whose logit is
                subtracted.
            label: Name or index of the label of a classifier whose logit is explained. The only label of a
                reranker need not be named.
            direction: Vector d (E,), which is not normalized.
            methods: One or several of "contributions", "output_share", "leave_one_out" (one run of the model
                per token), "rollout", "received_attention" and "contribution_norm" (one run of the
                contributions graph per component of the embedding).
            level: "tokens" or "words". Scores of words are sums over their tokens.
            head_contributions: Whether to return contributions of heads.
            pooling, dimensions, prompt_name, prompt, truncate, model: See `embed`.
            target_prompt_name, target_prompt: Prompt of `to` and `rather_than`.

        Raises:
            TypeError, ValueError: An argument is invalid for any server.
            NotSupportedError: The bundle does not support a method, see `ModelInfo.explain_methods`.
            RequestTooExpensiveError: A text needs more runs of the model than the server allows.
            BadReplyError: The reply is invalid, or its scores do not add up.
            AttnlensError: A call failed.

        >>> [text] = client.explain(["The animal didn't cross the street because it was too tired."])
        >>> [(token, round(score, 4)) for token, score in text.top(2)]
        [('animal', 0.2813), ('street', 0.1575)]
        >>> scores = text.by("contributions")
        >>> round(scores.baseline, 4), round(scores.sum, 4), round(text.target_value, 4)
        (0.0825, 1.0, 1.0)

        Why is this text closer to "music" than to "sports"?

        >>> [text] = client.explain(["A man plays the guitar."], to="music", rather_than="sports")
        >>> text.top(1)[0][0]
        'guitar'
        """
        return self._driver.result(calls.run(self._session, plan))

    @takes(plans.compare)
    def compare(self, plan: ComparePlan) -> Comparison:
        """Return the contributions of the tokens of two texts to their similarity.

        `ModelInfo.similarity` is the function, the cosine or the dot product.

        Args:
            a, b: The two texts.
            matrix: Scores of token pairs to return, or None:

                - "output": similarities of the token vectors, whose sum is the similarity.
                - "interaction": effect on the similarity of removing both tokens, minus the effects of
                  removing each. Needs one run of the model per token.
                - "input": joint contributions of the input tokens, whose sum with `baseline_row`,
                  `baseline_column` and `baseline` is the similarity. Needs one run per component of the
                  embedding.
            methods, level, head_contributions: See `explain`. Each text is explained towards the other.
            pooling, dimensions, truncate, model: See `embed`.
            prompt_name_a, prompt_a, prompt_name_b, prompt_b: Prompts of the two texts.

        Raises:
            TypeError, ValueError, AttnlensError: See `explain`.

        >>> a, b = "A man is playing a guitar.", "Someone plays an instrument."
        >>> pair = client.compare(a, b, matrix="interaction")
        >>> round(pair.similarity, 4), pair.top_pairs(1)[0][:2]
        (0.6674, ('guitar', 'instrument'))
        >>> [token for token, _ in pair.a.top(2)], [token for token, _ in pair.b.top(2)]
        (['guitar', 'playing'], ['instrument', 'plays'])
        """
        return self._driver.result(calls.compare(self._session, plan))

    @takes(scoring.rerank)
    def rerank(self, plan: RerankPlan) -> list[RankedDocument]:
        """Return the documents by descending relevance to a query. Needs a reranker.

        Equal documents are computed once. Documents with equal logits stay in their order.

        Args:
            query: Query. It is never truncated.
            documents: Documents, each a str.
            top_n: Maximum number of results. If None, all.
            long_documents: Handling of a document that does not fit into the model's input with its query:
                "truncate" it, "split" it into parts and return the highest logit, or "reject" the request.
            max_tokens_per_document: Maximum number of tokens of a document. If None, only the model's input
                limits it.
            activation: Function from logits to scores, "identity" or "sigmoid". If None, that of the model.
            prompt_name, prompt: Prompt that precedes the query, see `embed`.
            explain: Whether to explain each result: the contributions of query and document to the logit.
            level: Unit of the contributions, "words" or "tokens".
            model, progress: See `embed`.

        Raises:
            TypeError, ValueError: An argument is invalid for any server.
            NotSupportedError: The model is not a reranker, or does not support explanations.
            InputTooLongError: The query leaves no token for a document, or a document is too long and
                `long_documents` is "reject".
            BadReplyError: The reply is invalid.
            AttnlensError: A call failed.
        """
        return self._driver.result(calls.run(self._session, plan))

    @takes(scoring.score)
    def score(self, plan: ScorePlan) -> Scores:
        """Return the relevance of documents to a query, in their order: scores (N,) and logits (N,).

        Arguments and errors are those of `rerank`, without `top_n`.
        """
        return self._driver.result(calls.run(self._session, plan))

    @takes(scoring.score_pairs)
    def score_pairs(self, plan: ScorePlan) -> Scores:
        """Return the relevance of the second to the first text of each pair: scores (N,) and logits (N,).

        Args:
            pairs: Tuples (query, document).
            long_documents, max_tokens_per_document, activation: See `rerank`.
            prompt_name, prompt, model, progress: See `rerank`.

        Raises:
            TypeError, ValueError, NotSupportedError, InputTooLongError, AttnlensError: See `rerank`.
        """
        return self._driver.result(calls.run(self._session, plan))

    @takes(scoring.classify)
    def classify(self, plan: ClassifyPlan) -> Classification:
        """Return logits and scores (N, C) of each text for the C labels of a classifier.

        `Classification.top` returns the labels of each text in descending order.

        Args:
            texts: Texts.
            activation: Function from logits to scores, "identity", "sigmoid" or "softmax". If None, that of
                the model.
            prompt_name, prompt, truncate, model, progress: See `embed`.

        Raises:
            TypeError, ValueError: An argument is invalid for any server.
            NotSupportedError: The model is not a classifier.
            InputTooLongError: A text is too long and `truncate` is not set.
            BadReplyError: The reply is invalid.
            AttnlensError: A call failed.
        """
        return self._driver.result(calls.run(self._session, plan))

    def get_model(self, name: str = "") -> ModelInfo:
        """Return the description of a model. "" is the default model.

        >>> model = client.get_model()
        >>> model.hidden_size, model.num_layers, model.num_heads, model.pooling
        (384, 6, 12, 'mean')
        """
        return self._driver.result(calls.get_model(self._session, name))

    def list_models(self) -> list[ModelInfo]:
        """Return the descriptions of all models.

        >>> len(client.list_models())
        1
        """
        return self._driver.result(calls.list_models(self._session))


class Client(Connection, BlockingMethods):
    """Client for an attnlens server. Its methods are documented in `BlockingMethods`.

    >>> with Client(address) as client:
    ...     client.embed(["The cat sat.", "It rained."]).shape
    (2, 384)
    """

    _driver: Driver

    def __post_init__(self) -> None:
        super().__post_init__()
        self._driver = Driver(self)
