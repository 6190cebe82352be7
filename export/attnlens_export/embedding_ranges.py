"""Measures the range of each embedding component, for quantized embeddings.

Shapes: N texts, T tokens of a text, D hidden size, E embedding size.
"""

from pathlib import Path

import numpy as np

from attnlens.costs import flops_per_token
from attnlens.dense import open_layers
from attnlens.pooling import Pooling, finish, pool
from attnlens.tensors import to_tensor
from attnlens.v1.manifest_pb2 import EmbeddingRanges
from attnlens.v1.tensor_pb2 import DataType
from attnlens_export.graph.names import EMBEDDINGS_PATH, HIDDEN_OUTPUT
from attnlens_export.int8.texts import make_batches, read_kinds
from attnlens_export.parity.sessions import open_session
from attnlens_export.progress import StageProgress, report_each
from attnlens_export.published.pooling import read_pooling
from attnlens_export.published.prompts import read_prompts
from attnlens_export.published.side_files import read_max_tokens
from attnlens_export.tokenizer.read import BundleTokenizer
from attnlens_model import EncoderConfig

# Floating-point operations that an export spends. A larger model is measured on fewer texts, of all kinds: on
# `_ENOUGH_TEXTS`, or on fewer if these take more than `_MAX_FLOPS`.
_FLOPS = 1e12
_MAX_FLOPS = 4e12
_ENOUGH_TEXTS = 400
_MIN_TEXTS = 100
# Maximum length of a text without its prompt. With all tokens, the ranges of MiniLM clip 0.40 instead of
# 0.41 % of the components of the STS benchmark, and 0.15 instead of 0.18 % of those of passages, in 1.5 times
# the time.
MAX_TEXT_TOKENS = 32


def measure_ranges(directory: Path, config: EncoderConfig, progress: StageProgress) -> EmbeddingRanges | None:
    """Return the ranges of the embeddings of this package's texts, computed with the defaults of the bundle.

    Returns:
        The ranges. None if the bundle has no tokenizer, or if the model is too large.
    """
    tokenizer_path = directory / "tokenizer.json"
    if not tokenizer_path.is_file():
        return None
    prompts, pooling = read_prompts(directory), read_pooling(directory, config.vector_size)
    prompt = prompts.texts.get(prompts.default_name, "")
    num_prompt_tokens = BundleTokenizer(tokenizer_path, 1).num_prompt_tokens(prompt)
    num_excluded = num_prompt_tokens if pooling.exclude_prompt else 0
    texts = [text for texts in read_kinds(None).values() for text in texts]
    max_tokens = min(num_prompt_tokens + MAX_TEXT_TOKENS, read_max_tokens(directory, config))
    batches = make_batches(texts, tokenizer_path, config, max_tokens, prompt)
    num_tokens = sum(batch.inputs.input_ids.size for batch in batches)
    token_flops = flops_per_token(config.hidden_size, config.intermediate_size, config.num_layers)
    flops = num_tokens * token_flops
    step = min(-(-flops // int(_FLOPS)), len(texts) // _ENOUGH_TEXTS)
    step = max(1, step, -(-flops // int(_MAX_FLOPS)))
    if len(texts) // step < _MIN_TEXTS:
        return None
    if step > 1:
        batches = make_batches(texts[::step], tokenizer_path, config, max_tokens, prompt)
    session = open_session(directory / EMBEDDINGS_PATH)
    pooled = []
    for batch in report_each(batches, progress, ""):
        (hidden,) = session.run([HIDDEN_OUTPUT], batch.inputs.feed())
        for vectors, mask in zip(hidden, batch.inputs.attention_mask, strict=True):
            if mask.sum() > num_excluded:
                pooled.append(pool(vectors[mask == 1], Pooling(pooling.pooling), num_excluded))
    embeddings = finish(
        np.stack(pooled),
        open_layers(directory, pooling.dense, config.vector_size),
        dimensions=pooling.truncate_dim or None,
        normalize_first=pooling.normalize,
    )  # (N, E)
    ranges = np.stack([embeddings.min(axis=0), embeddings.max(axis=0)])
    return EmbeddingRanges(values=to_tensor(ranges, DataType.DATA_TYPE_FLOAT32), num_texts=len(pooled))
