"""Detects checkpoints that were not trained for embeddings: classifiers, rerankers, sparse retrievers.

If bundles do not support the head of a checkpoint, only the encoder can be exported. Its embeddings may be
meaningless, so this must be requested explicitly.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnlens_export.json_files import read_object
from attnlens_export.published.modules import listed_kinds
from attnlens_export.published.prompts import PROMPTS_FILE

SPARSE = "a sparse encoder (SPLADE), whose vectors have a weight for each word of the vocabulary"
LATE_INTERACTION = "a late-interaction encoder (ColBERT), which computes one vector per token"
CROSS_ENCODER = "a cross-encoder (reranker), which computes a score for a pair of texts"
GENERATIVE = "a generative reranker, whose score is the difference between the logits of two tokens"
LISTWISE = "a listwise reranker, in which documents attend to each other"
CLASSIFIER = "a classifier or a reranker"

# `model_type` of sentence-transformers' own configuration.
_MODEL_TYPES = {
    "CrossEncoder": CROSS_ENCODER,
    "MultiVectorEncoder": LATE_INTERACTION,
    "SparseEncoder": SPARSE,
}
_MODULES = {
    "LogitScore": GENERATIVE,
    "MLMTransformer": SPARSE,
    "MultiVectorMask": LATE_INTERACTION,
    "SpladePooling": SPARSE,
}
_ARCHITECTURES = {
    "ColBERT": LATE_INTERACTION,
    "ForMultipleChoice": "a multiple-choice classifier",
    "ForQuestionAnswering": "a model for question answering",
    "ForRanking": LISTWISE,
    "ForSequenceClassification": CLASSIFIER,
    "ForTokenClassification": "a token classifier, for example for named entities",
}
# Excludes heads used only in pretraining, such as ALBERT's `sop_classifier`.
_TENSORS = re.compile(
    r"^(?!.*sop_classifier)(.*\.)?(pre_classifier|classifier|classification_head|qa_outputs|score)\."
)
_COLBERT_TENSORS = re.compile(r"^linear\.")
_MASKED_LM = "ForMaskedLM"
_COLBERT_FILE = "artifact.metadata"  # written by the original ColBERT
_MAX_NAMED = 3
_REMEDIES = {
    GENERATIVE: "convert it to a ...ForSequenceClassification checkpoint, whose score.weight is the "
    "difference between the rows of these tokens in lm_head.weight",
    LISTWISE: "export a reranker that scores one pair at a time",
}


@dataclass(frozen=True)
class Head:
    """The task head that an export omits.

    Attributes:
        checkpoint_kind: Description of the checkpoint for error messages.
        tensors: Names of the head's tensors. May be empty.
    """

    checkpoint_kind: str
    tensors: tuple[str, ...] = ()

    @property
    def remedy(self) -> str:
        """Advice on a different checkpoint to export."""
        return _REMEDIES.get(self.checkpoint_kind, "export an embedding model, a classifier or a reranker")

    def describe(self) -> str:
        """Return a description of the checkpoint and its head."""
        if not self.tensors:
            return f"this checkpoint is {self.checkpoint_kind}"
        more = f" and {len(self.tensors) - _MAX_NAMED} more" if len(self.tensors) > _MAX_NAMED else ""
        names = ", ".join(self.tensors[:_MAX_NAMED])
        return f"this checkpoint is {self.checkpoint_kind}, judging by its head ({names}{more})"


def find_head(directory: Path, unused_tensors: Iterable[str]) -> Head | None:
    """Return the task head of a checkpoint, or None for an embedding checkpoint.

    Args:
        directory: Checkpoint directory.
        unused_tensors: Names of checkpoint tensors that the encoder does not use.

    Raises:
        SourceError: A checkpoint file is invalid.
    """
    kinds = listed_kinds(directory)
    stated = _MODEL_TYPES.get(str(read_object(directory / PROMPTS_FILE).get("model_type")))
    what = next((what for kind in kinds if (what := _module(kind))), None) or stated
    if what is None and (directory / _COLBERT_FILE).exists():
        what = LATE_INTERACTION
    if what is None and "Pooling" in kinds:
        return None  # a Pooling module means the checkpoint is for embeddings
    names = tuple(unused_tensors)
    architecture = _architecture(directory)
    tensors = tuple(name for name in names if _TENSORS.match(name))
    if LATE_INTERACTION in (architecture, what):
        tensors += tuple(name for name in names if _COLBERT_TENSORS.match(name))
    if what is None and (tensors or architecture in (CLASSIFIER, LISTWISE)):
        what = architecture or "a model for a different task"
    return Head(what, tensors) if what else None


def is_masked_language_model(directory: Path) -> bool:
    """Return whether a checkpoint has a head for masked language modeling, and no pooling is published.

    It is a pretrained encoder, or a sparse encoder in the format of transformers: the files do not say which.

    Raises:
        SourceError: A checkpoint file is invalid.
    """
    if "Pooling" in listed_kinds(directory):
        return False
    classes = read_object(directory / "config.json").get("architectures")
    return any(str(name).endswith(_MASKED_LM) for name in (classes if isinstance(classes, list) else []))


def _module(kind: str) -> str | None:
    return LATE_INTERACTION if kind.startswith("pylate.") else _MODULES.get(kind)


def _architecture(directory: Path) -> str | None:
    classes = read_object(directory / "config.json").get("architectures")
    names: Sequence[object] = classes if isinstance(classes, list) else []
    found = (
        what for ending, what in _ARCHITECTURES.items() if any(str(name).endswith(ending) for name in names)
    )
    return next(found, None)
