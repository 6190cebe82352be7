"""What a checkpoint is used for, where that is not embeddings: classifiers, rerankers, sparse retrieval.

A bundle holds the encoder. The embeddings of a checkpoint that was not trained to give any are a surprise, so
they are made only where somebody asks for them.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnlens_export.json_files import read_object
from attnlens_export.published.modules import listed_kinds
from attnlens_export.published.prompts import PROMPTS_FILE

SPARSE = "a sparse encoder (SPLADE), whose vectors have a weight for each word of the vocabulary"
LATE_INTERACTION = "a late-interaction encoder (ColBERT), which gives a text one vector for each token"
CROSS_ENCODER = "a cross-encoder (reranker), which gives a pair of texts a score"

# `model_type` of sentence-transformers' own configuration.
_MODEL_TYPES = {
    "CrossEncoder": CROSS_ENCODER,
    "MultiVectorEncoder": LATE_INTERACTION,
    "SparseEncoder": SPARSE,
}
_MODULES = {
    "LogitScore": CROSS_ENCODER,
    "MLMTransformer": SPARSE,
    "MultiVectorMask": LATE_INTERACTION,
    "SpladePooling": SPARSE,
}
_ARCHITECTURES = {
    "ColBERT": LATE_INTERACTION,
    "ForMultipleChoice": "a classifier, which chooses among answers",
    "ForQuestionAnswering": "a model that finds an answer in a text",
    "ForSequenceClassification": "a classifier or a reranker",
    "ForTokenClassification": "a classifier of tokens, as for names",
}
# Not those of a masked language model or of other pretraining, such as ALBERT's `sop_classifier`.
_TENSORS = re.compile(
    r"^(?!.*sop_classifier)(.*\.)?(pre_classifier|classifier|classification_head|qa_outputs|score)\."
)
_COLBERT_TENSORS = re.compile(r"^linear\.")
_MAX_NAMED = 3


@dataclass(frozen=True)
class Head:
    """What an export of the encoder alone loses.

    Attributes:
        what: the checkpoint, in words.
        tensors: those of the head that the encoder has no use for; may be empty.
    """

    what: str
    tensors: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return what the checkpoint is, and what of it is lost."""
        if not self.tensors:
            return f"this checkpoint is {self.what}"
        more = f" and {len(self.tensors) - _MAX_NAMED} more" if len(self.tensors) > _MAX_NAMED else ""
        return f"this checkpoint is {self.what}, by its head ({', '.join(self.tensors[:_MAX_NAMED])}{more})"


def find_head(directory: Path, unused_tensors: Iterable[str]) -> Head | None:
    """Return what a checkpoint has beside its encoder and is used for; None where that is embeddings.

    Args:
        directory: the checkpoint.
        unused_tensors: the names of its tensors that are no part of the encoder.

    Raises:
        SourceError: a file of it is broken.
    """
    kinds = listed_kinds(directory)
    stated = _MODEL_TYPES.get(str(read_object(directory / PROMPTS_FILE).get("model_type")))
    what = stated or next((what for kind in kinds if (what := _module(kind))), None)
    if what is None and "Pooling" in kinds:
        return None  # the publisher embeds with it, whatever else is in the file
    names = tuple(unused_tensors)
    architecture = _architecture(directory)
    tensors = tuple(name for name in names if _TENSORS.match(name))
    if architecture == LATE_INTERACTION:
        tensors += tuple(name for name in names if _COLBERT_TENSORS.match(name))
    if what is None and tensors:
        what = architecture or "a model for another task"
    return Head(what, tensors) if what else None


def _module(kind: str) -> str | None:
    return LATE_INTERACTION if kind.startswith("pylate.") else _MODULES.get(kind)


def _architecture(directory: Path) -> str | None:
    classes = read_object(directory / "config.json").get("architectures")
    names: Sequence[object] = classes if isinstance(classes, list) else []
    found = (
        what for ending, what in _ARCHITECTURES.items() if any(str(name).endswith(ending) for name in names)
    )
    return next(found, None)
