"""Tokenizers of bundles: the ids of `AutoTokenizer`, in every reader of the bundle."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, normalizers, processors

from attnlens_export import SourceError
from attnlens_export.published.side_files import read_tokenizer_choice
from attnlens_export.tokenizer.write import write_tokenizer
from attnlens_model import CheckpointError
from attnlens_publisher.tokenizer import TEXTS
from attnlens_server.text import TextEncoder
from configs import small_config
from sentencepiece_families import SENTENCEPIECE
from small_bundles import TOKENIZERS
from small_files import read, write

MAX_TOKENS = 12
CONFIG = small_config({"embeddings.vocab_size": 500})
PROBES: list[Any] = [
    *TEXTS,
    "a [MASK] b<mask>c [Q] the [D]x <ent> <|endoftext|>",
    "a long text " * 9,
    ("the first text is long " * 4, "the second is short"),
]
MODEL_TYPES = {
    "wordpiece": "bert",
    "wordpiece-cased": "bert",
    "byte-level": "roberta",
    "unigram": "xlm-roberta",
}

Files = Mapping[str, Mapping[str, object]]
Checkpoint = Callable[..., Path]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Return a function that writes a checkpoint without weights."""

    def make(
        kind: str, settings: object = None, *, keep: tuple[str, ...] = (), files: Files | None = None
    ) -> Path:
        source = tmp_path / "source"
        source.mkdir()
        for path in (TOKENIZERS / kind).iterdir():
            if not keep or path.name in keep:
                shutil.copy(path, source)
        write(source / "config.json", {"model_type": MODEL_TYPES[kind]})
        for name, content in (files or {}).items():
            write(source / name, content)
        if settings is not None:
            write(source / "tokenizer_config.json", settings)
        return source

    return make


def check(source: Path, choice: Any = "transformers", **options: Any) -> tuple[str, Path]:
    """Write a tokenizer, and compare all readers of the bundle with `AutoTokenizer` on the checkpoint.

    Return the description and the bundle.
    """
    bundle = source.with_name("bundle")
    description = write_tokenizer(bundle, source, choice, CONFIG, MAX_TOKENS, **options)
    expected = encode(source)
    assert from_tokenizers(bundle, with_types="token_type_ids" in expected[0]) == expected
    shutil.copy(source / "config.json", bundle)
    assert encode(bundle) == expected
    return description, bundle


def encode(directory: Path) -> list[dict[str, Any]]:
    """Return the inputs of a model according to `AutoTokenizer`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    encoded = []
    for text in PROBES:
        texts = (text,) if isinstance(text, str) else text
        inputs = tokenizer(*texts, truncation=True, max_length=MAX_TOKENS)
        encoded.append({key: value for key, value in inputs.items() if key != "attention_mask"})
    return encoded


def from_tokenizers(bundle: Path, *, with_types: bool) -> list[dict[str, Any]]:
    """Return the inputs of a model according to tokenizers, which our server agrees with."""
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    served = TextEncoder(bundle / "tokenizer.json", MAX_TOKENS)
    encoded = []
    for text in PROBES:
        encoding = tokenizer.encode(*((text,) if isinstance(text, str) else text))
        [ours] = served.encode([(text,) if isinstance(text, str) else text])
        assert ours.input_ids.tolist() == encoding.ids
        types = {"token_type_ids": encoding.type_ids} if with_types else {}
        assert with_types or not any(encoding.type_ids)
        encoded.append({"input_ids": encoding.ids, **types})
    return encoded


@pytest.mark.parametrize("kind", MODEL_TYPES)
@pytest.mark.parametrize("has_json", [True, False])
def test_tokenizer_of_each_kind(kind: str, checkpoint: Checkpoint, *, has_json: bool) -> None:
    source = checkpoint(kind)
    if not has_json:
        (source / "tokenizer.json").unlink()
    description, _ = check(source, None)
    version = transformers.__version__
    origins = {
        "wordpiece": f"BertTokenizer of transformers {version}, built from vocab.txt",
        "wordpiece-cased": f"BertTokenizer of transformers {version}, built from vocab.txt",
        "byte-level": f"RobertaTokenizer of transformers {version}, built from merges.txt and vocab.json",
        "unigram": f"XLMRobertaTokenizer of transformers {version}, built from sentencepiece.bpe.model",
    }
    assert has_json or description == origins[kind]
    assert not has_json or description.endswith(", equal to tokenizer.json")


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("wordpiece", {"do_lower_case": False}),
    ("wordpiece", {"do_lower_case": True, "strip_accents": False, "tokenize_chinese_chars": False}),
    ("wordpiece", {"tokenizer_class": "SplinterTokenizer", "do_lower_case": False}),
    ("wordpiece", {"model_input_names": ["input_ids", "attention_mask"]}),
    ("wordpiece", {"truncation_side": "left"}),
    ("wordpiece", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ("byte-level", {"add_prefix_space": True}),
    ("byte-level", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
    ("byte-level", {"tokenizer_class": "GPT2Tokenizer"}),
    ("unigram", {"truncation_side": "left"}),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS, ids=str)
def test_settings_outside_tokenizer_json(kind: str, settings: dict[str, Any], checkpoint: Checkpoint) -> None:
    check(checkpoint(kind, settings))


def added(**places: Any) -> Files:
    return {f"{name}.json": content for name, content in places.items()}


ADDED: dict[str, Files] = {
    "decoder": added(
        tokenizer_config={
            "added_tokens_decoder": {"300": {"content": "[Q]", "lstrip": True}},
            "unk_token": "[UNK]",
        }
    ),
    "added_tokens": added(added_tokens={"[Q]": 300, "[D]": 301}),
    "map": added(special_tokens_map={"additional_special_tokens": ["[Q]", "[D]"]}),
    "extra map": added(
        special_tokens_map={"extra_special_tokens": [{"content": "[Q]", "rstrip": True}, "[D]"]}
    ),
    "extra": added(tokenizer_config={"extra_special_tokens": ["[Q]", "the"]}),
    "named": added(tokenizer_config={"extra_special_tokens": {"question_token": "[Q]"}}),
    "mask": added(
        tokenizer_config={"mask_token": {"content": "[Q]", "lstrip": True, "__type": "AddedToken"}}
    ),
}


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("kind", ["wordpiece", "byte-level", "unigram"])
def test_tokens_that_are_added_in_other_files(name: str, kind: str, checkpoint: Checkpoint) -> None:
    _, bundle = check(checkpoint(kind, files=ADDED[name]))
    assert Tokenizer.from_file(str(bundle / "tokenizer.json")).token_to_id("[Q]") == 300


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_models_of_the_families(name: str, sentencepiece_source: Callable[[str], Path]) -> None:
    check(sentencepiece_source(name), None)


def test_mpnet_has_the_templates_of_roberta_and_the_words_of_bert(checkpoint: Checkpoint) -> None:
    source = checkpoint("wordpiece", {"tokenizer_class": "MPNetTokenizer"}, keep=("vocab.txt",))
    path = source / "vocab.txt"
    path.write_text("<s>\n<pad>\n</s>\n<mask>\n" + path.read_text("utf-8"), "utf-8")
    _, bundle = check(source, None)
    assert Tokenizer.from_file(str(bundle / "tokenizer.json")).encode("the", "of").tokens == [
        *("<s>", "the", "</s>", "</s>", "of", "</s>")
    ]


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_sentencepiece_model_of_type_bpe(model_type: str, train: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    options = {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "byte_fallback": True,
        "vocab_size": 400,
    }
    pieces = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "bos_piece": "<bos>", "eos_piece": "<eos>"}
    train.train_sentencepiece(source / "tokenizer", **options | (pieces if model_type != "llama" else {}))
    write(source / "config.json", {"model_type": model_type})
    check(source, None)


def test_difference_from_tokenizer_json_is_shown_and_the_option_decides(checkpoint: Checkpoint) -> None:
    source = checkpoint("byte-level", {"add_prefix_space": True})
    with pytest.raises(SourceError) as caught:
        check(source, None)
    message = str(caught.value)
    assert "tokenizer.json and RobertaTokenizer of transformers" in message
    assert (
        "for 15 texts: ('', 'b') has [0, 2, 2, 70, 2] in tokenizer.json and [0, 2, 2, 274, 2] in" in message
    )
    assert (
        "choose with --tokenizer transformers, as sentence-transformers does, or --tokenizer published"
        in message
    )
    description, bundle = check(source)
    assert description.endswith(" as requested, not tokenizer.json of the checkpoint")
    assert read_tokenizer_choice(bundle) == "transformers"
    published = source.with_name("published")
    description = write_tokenizer(published, source, "published", CONFIG, MAX_TOKENS)
    assert read_tokenizer_choice(published) == "published"
    assert description.startswith("tokenizer.json of the checkpoint as requested, not AutoTokenizer")
    shutil.copy(source / "config.json", published)
    file = Tokenizer.from_file(str(source / "tokenizer.json"))
    file.enable_truncation(MAX_TOKENS)
    ids = [file.encode(*((text,) if isinstance(text, str) else text)).ids for text in PROBES]
    assert [inputs["input_ids"] for inputs in from_tokenizers(published, with_types=False)] == ids
    assert [inputs["input_ids"] for inputs in encode(published)] == ids


@pytest.mark.parametrize("kind", [Path, str])
def test_given_file_replaces_tokenizer_and_settings(
    kind: Any, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source = checkpoint("wordpiece", {"do_lower_case": True})
    mine = TOKENIZERS / "wordpiece-cased" / "tokenizer.json"
    bundle = tmp_path / "bundle"
    assert write_tokenizer(bundle, source, kind(mine), CONFIG, MAX_TOKENS) == str(mine)
    shutil.copy(source / "config.json", bundle)
    file = Tokenizer.from_file(str(mine))
    file.enable_truncation(MAX_TOKENS)
    ids = [file.encode(*((text,) if isinstance(text, str) else text)).ids for text in PROBES]
    assert [inputs["input_ids"] for inputs in encode(bundle)] == ids
    assert read(bundle / "special_tokens_map.json") == {"pad_token": "[PAD]"}


def test_lowercasing_of_sentence_transformers_comes_first(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("byte-level")
    bundle = tmp_path / "bundle"
    write_tokenizer(bundle, source, None, CONFIG, MAX_TOKENS, lowercase=True)
    shutil.copy(source / "config.json", bundle)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Lowercase()
    for each in (Tokenizer.from_file(str(bundle / "tokenizer.json")), auto(bundle).backend_tokenizer):
        assert each.encode("The NASA").ids == tokenizer.encode("The NASA").ids


def auto(directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory)


def test_settings_of_the_bundle(checkpoint: Checkpoint) -> None:
    mask = {"content": "[Q]", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    settings = {
        "mask_token": mask | {"__type": "AddedToken"},
        "max_length": 5,
        "model_max_length": 1e30,
        "split_special_tokens": False,
    }
    _, bundle = check(checkpoint("byte-level", settings))
    tokens = {f"{name}_token": f"<{name}>" for name in ("unk", "pad")}
    tokens |= {"cls_token": "<s>", "bos_token": "<s>", "sep_token": "</s>", "eos_token": "</s>"}
    assert read(bundle / "tokenizer_config.json") == tokens | {
        "attnlens_tokenizer": "transformers",
        "tokenizer_class": "RobertaTokenizer",
        "mask_token": settings["mask_token"],
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": MAX_TOKENS,
        "truncation_side": "right",
    }
    assert read(bundle / "special_tokens_map.json") == tokens | {"mask_token": mask}
    content = read(bundle / "tokenizer.json")
    truncation = {"direction": "Right", "max_length": MAX_TOKENS, "strategy": "LongestFirst", "stride": 0}
    assert (content["truncation"], content["padding"]) == (truncation, None)


@pytest.mark.parametrize(
    "processor",
    [
        None,
        processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
        processors.ByteLevel(),
        processors.Sequence(
            [
                processors.ByteLevel(),
                processors.TemplateProcessing(
                    single="$A:1 [SEP]:1", pair="$A [SEP] $B:1 [SEP]:1", special_tokens=[("[SEP]", 3)]
                ),
            ]
        ),
    ],
)
def test_model_without_token_types_is_given_none(processor: Any, checkpoint: Checkpoint) -> None:
    source = checkpoint(
        "wordpiece", {"model_input_names": ["input_ids"], "tokenizer_class": "PreTrainedTokenizerFast"}
    )
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    if processor is None:
        content = json.loads(tokenizer.to_str()) | {"post_processor": None}
        write(source / "tokenizer.json", content)
    else:
        tokenizer.post_processor = processor
        tokenizer.save(str(source / "tokenizer.json"))
    check(source)


@pytest.mark.parametrize(
    ("kind", "settings", "files", "message"),
    [
        (
            "wordpiece",
            {"split_special_tokens": True},
            (),
            "split_special_tokens in tokenizer_config.json splits",
        ),
        (
            "wordpiece",
            {"auto_map": {"AutoTokenizer": ["a.B", None]}},
            (),
            "auto_map in tokenizer_config.json needs",
        ),
        (
            "wordpiece",
            {"tokenizer_class": "RoFormerTokenizer"},
            (),
            "ImportError: You need to install rjieba",
        ),
        ("wordpiece", {"tokenizer_class": "BertJapaneseTokenizer"}, ("vocab.txt",), "BertJapaneseTokenizer"),
        (
            "wordpiece",
            {"tokenizer_class": "CanineTokenizer"},
            (),
            "CanineTokenizer of transformers has no fast",
        ),
        ("wordpiece", {"truncation_side": "middle"}, (), "'right' and 'left', current value: middle"),
        (
            "wordpiece",
            {"tokenizer_class": "XLMRobertaTokenizer"},
            ("vocab.txt",),
            "sentencepiece.bpe.model or token",
        ),
        (
            "unigram",
            {"tokenizer_class": "BertTokenizer"},
            ("sentencepiece.bpe.model",),
            "reads tokenizer.json or voc",
        ),
        ("byte-level", {}, ("vocab.json",), "`vocab` and `merges` must be both"),
    ],
)
def test_tokenizer_that_tokenizer_json_cannot_express_is_refused_with_a_remedy(
    kind: str, settings: dict[str, Any], files: tuple[str, ...], message: str, checkpoint: Checkpoint
) -> None:
    source = checkpoint(kind, settings, keep=files)
    with pytest.raises(SourceError, match=message) as caught:
        check(source, None)
    assert "with --tokenizer FILE" in str(caught.value)
    assert ("with --tokenizer published" in str(caught.value)) is not bool(files)


def test_end_token_on_which_versions_disagree_is_refused(checkpoint: Checkpoint) -> None:
    source = checkpoint(
        "byte-level", {"tokenizer_class": "GPT2Tokenizer", "add_eos_token": True, "eos_token": "<mask>"}
    )
    with pytest.raises(SourceError, match=r"sets add_eos_token, but tokenizer\.json does not append <mask>"):
        check(source, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "is not a tokenizer"), ("version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer")],
)
@pytest.mark.parametrize("is_given", [True, False])
def test_broken_tokenizer_is_named(
    content: str, message: str, checkpoint: Checkpoint, tmp_path: Path, *, is_given: bool
) -> None:
    source = checkpoint("wordpiece")
    path = source / "tokenizer.json"
    path.write_text(content)
    with pytest.raises((SourceError, CheckpointError), match=rf"tokenizer\.json {message}"):
        write_tokenizer(tmp_path / "bundle", source, path if is_given else None, CONFIG, MAX_TOKENS)


def test_tokenizer_of_another_model_is_rejected(checkpoint: Checkpoint) -> None:
    small = small_config({"embeddings.vocab_size": 299})
    source = checkpoint("wordpiece")
    with pytest.raises(SourceError, match=r"has the id 299 .*vocab_size=299"):
        write_tokenizer(source.with_name("bundle"), source, None, small, MAX_TOKENS)


def test_added_token_without_an_embedding_is_accepted_and_named(checkpoint: Checkpoint) -> None:
    source = checkpoint("wordpiece")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_tokens(["<image>"])
    tokenizer.save(str(source / "tokenizer.json"))
    rows = small_config({"embeddings.vocab_size": 300})
    description = write_tokenizer(source.with_name("bundle"), source, None, rows, MAX_TOKENS)
    assert description.endswith("; texts with added tokens that have no embedding are rejected: '<image>'")


def test_without_tokenizer_files_nothing_is_written(tmp_path: Path) -> None:
    write(tmp_path / "source" / "config.json", {"model_type": "bert"})
    write(tmp_path / "source" / "tokenizer_config.json", {"mask_token": "[MASK]"})
    assert not write_tokenizer(tmp_path / "bundle", tmp_path / "source", None, CONFIG, MAX_TOKENS)
    assert not (tmp_path / "bundle").exists()
