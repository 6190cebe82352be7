"""Build recipes by tokenizer class: files, special tokens and templates."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Recipe:
    """Build recipe of a tokenizer class.

    Attributes:
        kind: "wordpiece", "byte_level" or "unigram".
        files: Names of vocabulary files.
        special_tokens: Default special tokens by name. A checkpoint may define others.
        single: Template of a single text: names of special tokens around "text".
        pair: Template of a text pair, in the syntax of the tokenizers library.
        layout: Order of SentencePiece pieces in the vocabulary (see `sentencepiece`).
        trims_offsets: Whether the post-processor is that of RoBERTa, which excludes whitespace from offsets.
        mask_takes_space: Whether the mask token includes a preceding space.
        has_unknown: Whether there is an unknown token. Byte-level tokenizers need none.
        appended: Names of special tokens that are appended to the vocabulary if it lacks them.
        fixed_settings: Keys of tokenizer_config.json that support only one value.
    """

    kind: str
    files: tuple[str, ...]
    special_tokens: Mapping[str, str]
    single: str = "{cls_token} text {sep_token}"
    pair: str = "{cls_token}:0 $A:0 {sep_token}:0 $B:1 {sep_token}:1"
    layout: str = "as_trained"
    trims_offsets: bool = False
    mask_takes_space: bool = False
    has_unknown: bool = True
    appended: tuple[str, ...] = ()
    fixed_settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def needs_all_files(self) -> bool:
        """Whether all files are required. SentencePiece file names are alternatives."""
        return self.kind != "unigram"

    @property
    def needed(self) -> set[str]:
        """Names of the special tokens that the vocabulary must contain."""
        names = {name for name in self.special_tokens if f"{{{name}}}" in self.single}
        return names | ({"unk_token"} if self.has_unknown else set())

    @property
    def wanted(self) -> str:
        """Required files, for error messages."""
        return (" and " if self.needs_all_files else " or ").join(self.files)


def _named(cls: str, sep: str, unk: str, pad: str, mask: str) -> dict[str, str]:
    return {"cls_token": cls, "sep_token": sep, "unk_token": unk, "pad_token": pad, "mask_token": mask}


_BERT = _named("[CLS]", "[SEP]", "[UNK]", "[PAD]", "[MASK]")
_ROBERTA = _named("<s>", "</s>", "<unk>", "<pad>", "<mask>")
_ROBERTA_PAIR = "{cls_token} $A {sep_token} {sep_token} $B {sep_token}"
# Every name that the classes below give their model, so that a copy under another's name is found too.
_SENTENCEPIECE_FILES = ("sentencepiece.bpe.model", "spiece.model", "spm.model", "tokenizer.model")

_WORDPIECE = Recipe(
    "wordpiece",
    ("vocab.txt",),
    _BERT,
    fixed_settings={"do_basic_tokenize": True, "never_split": [], "wordpiece_tokenizer_type": "wordpiece"},
)

RECIPES: dict[str, Recipe] = {
    "BertTokenizer": _WORDPIECE,
    "DistilBertTokenizer": _WORDPIECE,
    "ElectraTokenizer": _WORDPIECE,
    "MPNetTokenizer": Recipe(
        "wordpiece",
        ("vocab.txt",),
        _named("<s>", "</s>", "[UNK]", "<pad>", "<mask>"),
        trims_offsets=True,
        mask_takes_space=True,
        fixed_settings=_WORDPIECE.fixed_settings,
    ),
    "RobertaTokenizer": Recipe(
        "byte_level",
        ("vocab.json", "merges.txt"),
        _ROBERTA,
        trims_offsets=True,
        mask_takes_space=True,
        has_unknown=False,
    ),
    "DebertaTokenizer": Recipe(
        "byte_level", ("vocab.json", "merges.txt"), _BERT, mask_takes_space=True, has_unknown=False
    ),
    "GPT2Tokenizer": Recipe(
        "byte_level",
        ("vocab.json", "merges.txt"),
        dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
        single="text",
        pair="$A $B",
        has_unknown=False,
        fixed_settings={"add_bos_token": False, "add_eos_token": False},
    ),
    "XLMRobertaTokenizer": Recipe(
        "unigram",
        _SENTENCEPIECE_FILES,
        _ROBERTA,
        pair=_ROBERTA_PAIR,
        layout="fairseq",
        mask_takes_space=True,
    ),
    "CamembertTokenizer": Recipe(
        "unigram",
        _SENTENCEPIECE_FILES,
        _ROBERTA,
        pair=_ROBERTA_PAIR,
        layout="camembert",
        mask_takes_space=True,
    ),
    "AlbertTokenizer": Recipe(
        "unigram",
        _SENTENCEPIECE_FILES,
        _named("[CLS]", "[SEP]", "<unk>", "<pad>", "[MASK]"),
        layout="albert",
        mask_takes_space=True,
    ),
    "DebertaV2Tokenizer": Recipe(
        "unigram",
        _SENTENCEPIECE_FILES,
        _BERT,
        # [MASK] of deberta-v3-base is in none of its files: its class adds it.
        appended=("mask_token",),
        fixed_settings={"split_by_punct": False},
    ),
    "T5Tokenizer": Recipe(
        "unigram",
        _SENTENCEPIECE_FILES,
        {"sep_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        single="text {sep_token}",
        pair="$A {sep_token} $B {sep_token}",
        layout="t5",
    ),
}

_CLASS_OF_MODEL_TYPE = {
    "bert": "BertTokenizer",
    "distilbert": "DistilBertTokenizer",
    "electra": "ElectraTokenizer",
    "mpnet": "MPNetTokenizer",
    "roberta": "RobertaTokenizer",
    "deberta": "DebertaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
    "albert": "AlbertTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "t5": "T5Tokenizer",
}


def class_of_model_type(model_type: str) -> str:
    """Return the tokenizer class that is usual for a `model_type`, or a name that no recipe has."""
    return _CLASS_OF_MODEL_TYPE.get(model_type, f"of model_type {model_type}")
