"""Checkpoints whose texts sentence-transformers inserts into a chat template."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from attnlens.bundle import BundleError, read_manifest, write_manifest
from attnlens.chat_template import ChatTemplate
from attnlens.tensors import from_tensor
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_cli.show.model import model_table
from attnlens_client import InvalidRequestError
from attnlens_client.core.models import model_info
from attnlens_export import DifferenceError, ExportOptions, SourceError, bundle, export_bundle
from attnlens_export.claims import check_claims
from attnlens_export.embedding_ranges import MAX_TEXT_TOKENS
from attnlens_export.int8.texts import read_kinds
from attnlens_export.judge.compare import Rounding
from attnlens_export.judge.question import Question, compare_with_publisher
from attnlens_export.judge.reader import BundleReader
from attnlens_export.layouts import write_layout
from attnlens_export.parity.grid import small_grid
from attnlens_export.published.chat_template import render_template
from attnlens_export.tokenizer.read import BundleTokenizer
from attnlens_model import read_config
from attnlens_server import local
from attnlens_server.config import ServerConfig
from attnlens_server.errors import StartupError
from attnlens_server.served_model import ServedModel
from attnlens_server.text import TextEncoder, TokenSource
from published_layouts import chat_template, edit, save_decoder
from small_files import read, sign

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

LIMIT = 80
BEFORE = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n"
AFTER = "<|im_end|>\n"
TEXTS = [
    "The engineers in Zürich read it.",
    "",
    "\n\n leading and trailing \n\n",
    "a<|im_end|>\n<|im_start|>user\nb </s>",
    "{{ braces }} 東京 \U0001f44d\U0001f3fd",
    "word " * 100,
]
PROMPTS: list[dict[str, str]] = [{}, {"prompt_name": "query"}, {"prompt": "Über: "}, {"prompt": ""}]


class Exported(NamedTuple):
    source: Path
    bundle: Path
    manifest: Manifest


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    directory = tmp_path_factory.mktemp("template")
    chat_template(directory / "source")
    options = ExportOptions(grid=small_grid(16), comparison=True)
    found = export_bundle(directory / "source", directory / "bundle", options)
    line = f"chat template: each text is inserted between {BEFORE!r} and {AFTER!r}"
    assert line in found.decisions
    return Exported(directory / "source", directory / "bundle", found.manifest)


@pytest.fixture(scope="module")
def reference(exported: Exported) -> Any:
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - slow

    return SentenceTransformer(str(exported.source), device="cpu")


@pytest.fixture(scope="module")
def model(exported: Exported) -> Iterator[Any]:
    with local(exported.bundle) as opened:
        yield opened


@pytest.fixture(scope="module")
def encoder(exported: Exported) -> TextEncoder:
    template = ChatTemplate.read(exported.manifest.chat_template)
    return TextEncoder(exported.bundle / "tokenizer.json", LIMIT, template)


def their_ids(reference: Any, text: str, prompt: str) -> list[int]:
    ids: list[int] = reference.preprocess([text], prompt=prompt or None)["input_ids"][0].tolist()
    return ids


# --- The bundle -----------------------------------------------------------------------------------


def test_manifest_states_the_template_and_the_comparison(exported: Exported) -> None:
    manifest = exported.manifest
    template = ChatTemplate.read(manifest.chat_template)
    assert template.frame("").around("TEXT") == f"{BEFORE}TEXT{AFTER}"
    with_prompt = f"<|im_start|>system\nPROMPT<|im_end|>\n<|im_start|>user\nTEXT{AFTER}"
    assert template.frame("PROMPT").around("TEXT") == with_prompt
    assert list(manifest.required_features) == ["chat_template"]
    assert not manifest.supports_text_pairs
    assert manifest.publisher.longest_tokens == LIMIT
    assert {"token ids", "token ids (prompt query)", "embeddings"} <= {
        figure.result for figure in manifest.publisher.figures
    }
    assert all(figure.max_abs_error <= figure.limit for figure in manifest.publisher.figures)


def test_embeddings_are_those_of_sentence_transformers(model: Any, reference: Any) -> None:
    for prompt in PROMPTS:
        found = model.embed(TEXTS, truncate=True, **prompt)
        np.testing.assert_allclose(found, reference.encode(TEXTS, **prompt), atol=1e-5, err_msg=str(prompt))


def test_tokens_around_the_limit_are_those_of_sentence_transformers(
    encoder: TextEncoder, reference: Any, exported: Exported
) -> None:
    tokenizer = BundleTokenizer(exported.bundle / "tokenizer.json", LIMIT)
    words = [" ".join(["it"] * count) for count in range(60)]
    texts = [*TEXTS, *words, *(f"{text}\n<|im_end" for text in words), *(text + "\n" for text in words)]
    lengths = set()
    for prompt in ("", "Find the answer.", "long " * 40):
        encoded = encoder.encode([(text,) for text in texts], prompt=prompt)
        exporters = tokenizer.encode(texts, prompt)
        for text, found, other in zip(texts, encoded, exporters, strict=True):
            expected = their_ids(reference, text, prompt)
            assert found.input_ids.tolist() == other.ids == expected, (text, prompt)
            assert found.token_type_ids is None
            lengths.add(found.num_tokens_total)
    assert {LIMIT - 1, LIMIT, LIMIT + 1} <= lengths


def test_left_truncation_also_keeps_the_end(exported: Exported, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - slow

    source = Path(shutil.copytree(exported.source, tmp_path / "source"))
    edit(source / "tokenizer_config.json", truncation_side="left")
    reference = SentenceTransformer(str(source), device="cpu")
    changed = Path(shutil.copytree(exported.bundle, tmp_path / "bundle"))
    content = read(changed / "tokenizer.json")
    content["truncation"]["direction"] = "Left"
    edit(changed / "tokenizer.json", truncation=content["truncation"])
    template = ChatTemplate.read(exported.manifest.chat_template)
    encoder = TextEncoder(changed / "tokenizer.json", LIMIT, template)
    [found] = encoder.encode([("one " + "word " * 100,)])
    assert found.input_ids.tolist() == their_ids(reference, "one " + "word " * 100, "")


def test_sentence_transformers_reads_the_bundle_in_the_same_way(
    exported: Exported, reference: Any, tmp_path: Path
) -> None:
    """The bundle's files with the weights for PyTorch."""
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - slow

    copy = Path(shutil.copytree(exported.bundle, tmp_path / "bundle"))
    shutil.copy(exported.source / "model.safetensors", copy)
    opened: Any = SentenceTransformer(str(copy), device="cpu")
    for prompt in PROMPTS:
        np.testing.assert_array_equal(opened.encode(TEXTS, **prompt), reference.encode(TEXTS, **prompt))
    assert their_ids(opened, TEXTS[-1], "") == their_ids(reference, TEXTS[-1], "")


# --- Tokens and explanations ----------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", "Für é: "])
@pytest.mark.parametrize("text", ["Ein Zürich, 東京 ok", "\nx<|im_end|>y\n", "", "wörter " * 40])
def test_tokens_of_the_template_are_special_and_others_have_their_own_offsets(
    text: str, prompt: str, encoder: TextEncoder, exported: Exported
) -> None:
    [encoded] = encoder.encode([(text,)], prompt=prompt, with_record=True)
    tokens = encoder.describe(encoded)
    assert len(tokens.ids) == encoded.num_tokens <= LIMIT
    covered = {TokenSource.TEXT: "", TokenSource.PROMPT: ""}
    for source, (start, end), (first, last), word in zip(
        tokens.sources, tokens.chars, tokens.bytes, tokens.words, strict=True
    ):
        if source is TokenSource.SPECIAL:
            assert (start, end, first, last, word) == (0, 0, 0, 0, None)
            continue
        whole = text if source is TokenSource.TEXT else prompt
        assert whole.encode()[first:last].decode(errors="ignore") in whole[start:end]
        covered[source] = whole[: max(end, len(covered[source]))]
    is_cut = encoded.num_tokens < encoded.num_tokens_total
    assert covered[TokenSource.PROMPT].strip() == prompt.strip()
    assert is_cut or covered[TokenSource.TEXT].strip() == text.strip()
    ends = encoder.encode([("",)])[0].input_ids[-2:].tolist()
    assert tokens.sources[-2:] == [TokenSource.SPECIAL] * 2
    assert tokens.ids[-2:] == ends
    if not is_cut:
        rows = BundleTokenizer(exported.bundle / "tokenizer.json", LIMIT)
        if not prompt:
            [again] = rows.encode([text])
            found = [row for row, source in enumerate(tokens.sources) if source is TokenSource.TEXT]
            assert rows.select_text(again, text) == found


def test_explanations_are_about_the_tokens_of_the_text(model: Any) -> None:
    [found] = model.explain(["The engineers read it twice."], methods=["contributions", "leave_one_out"])
    is_special = np.array([token.is_special for token in found.tokens])
    assert is_special.sum() > 10
    contributions, removed = found.scores
    assert contributions.sum == pytest.approx(contributions.expected_sum, abs=1e-4)
    np.testing.assert_array_equal(np.isnan(removed.values), is_special)
    assert contributions.faithfulness is not None


def test_ranges_are_measured_with_the_template(exported: Exported, reference: Any) -> None:
    texts = [text for lines in read_kinds(None).values() for text in lines]
    reference.max_seq_length = min(len(their_ids(reference, "", "")) + MAX_TEXT_TOKENS, LIMIT)
    try:
        embeddings = reference.encode(texts)
    finally:
        reference.max_seq_length = LIMIT
    ranges = from_tensor(exported.manifest.embedding_ranges.values)
    np.testing.assert_allclose(ranges, [embeddings.min(axis=0), embeddings.max(axis=0)], atol=1e-5)


def test_information_names_the_template(exported: Exported) -> None:
    served = ServedModel(ServerConfig(bundle=exported.bundle))
    info = model_info(served.methods._describer.model())
    assert info.chat_template == (BEFORE, AFTER)
    rows = dict(zip(*(column._cells for column in model_table(info, "here").columns), strict=True))
    assert rows["chat template"] == f"{BEFORE!r}, the text, {AFTER!r}"


def test_page_of_a_model_repository_names_the_template(exported: Exported, tmp_path: Path) -> None:
    write_layout(exported.bundle, "triton", tmp_path / "models")
    assert f"Insert each text between {BEFORE!r} and {AFTER!r}" in (tmp_path / "models/README.md").read_text()


# --- Disagreements and refusals -------------------------------------------------------------------


def test_wrong_strings_are_found(exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = Path(shutil.copytree(exported.bundle, tmp_path / "bundle"))
    content = read(changed / "config.json")["attnlens_chat_template"]
    content["without_prompt"]["after_text"] = "<|im_end|>"
    edit(changed / "config.json", attnlens_chat_template=content)
    config = read_config(changed / "config.json")
    question = Question(exported.source, config, "embedder")
    result = compare_with_publisher(
        question, BundleReader(changed, config), Rounding(1e-6, 1e-6), lambda *_: None
    )
    first = next(found.what for found in result.comparisons if not found.passed)
    assert first == "difference of token ids"
    sign(changed)
    with pytest.raises(BundleError, match=r"chat_template\.without_prompt\.after_text is"):
        check_claims(changed, read_manifest(changed), config)
    monkeypatch.setattr(bundle, "render_template", lambda *_, **__: content)
    options = ExportOptions(grid=small_grid(16), comparison=True)
    with pytest.raises(DifferenceError, match="difference of token ids"):
        export_bundle(exported.source, tmp_path / "wrong", options)


def test_prompt_is_rejected_if_the_template_has_no_place_for_it(exported: Exported, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(exported.bundle, tmp_path / "bundle"))
    manifest = read_manifest(changed)
    manifest.chat_template.ClearField("with_prompt")
    write_manifest(changed, manifest)
    with pytest.raises(StartupError, match="the chat template does not support text pairs or prompts"):
        local(changed)
    manifest.prompts.clear()
    write_manifest(changed, manifest)
    with local(changed) as opened:
        opened.embed(["a"])
        with pytest.raises(InvalidRequestError, match=r"prompt is not supported, because .* system message"):
            opened.embed(["a"], prompt="x")


SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "format_", "has_prompts", "message"),
    [
        ("<s>{{ messages[0].content | trim }}</s>", "flat", False, "renders ' outer spaces ' as "),
        ("<s>{{ messages[0].content | e }}</s>", "flat", False, "renders '<b>&amp; "),
        (
            "<s>{{ messages[0].content.split('</think>')[-1] }}</s>",
            "flat",
            False,
            "renders '<think>a thought",
        ),
        ("<s>{{ messages[0].content[:999] }}</s>", "flat", False, "renders 'word word "),
        ("{{ messages[0].content }}{{ messages[0].content }}", "flat", False, "renders 'xqzv7text' as"),
        ("{{ range(9999) | random }}{{ messages[0].content }}", "flat", False, "renders '' as"),
        (
            "{{ strftime_now('%d') }}{{ messages[0].content }}",
            "flat",
            False,
            "reads the clock (strftime_now)",
        ),
        ("x" * 5000 + "{{ messages[0].content }}", "flat", False, "adds more than 4096 characters"),
        (
            SYSTEM + "{{ messages[0].content }}",
            "flat",
            True,
            "the checkpoint has prompts, which become system",
        ),
        ("{{ messages[0].content.nothing.more }}", "flat", False, "the chat template fails for"),
        ("", "flat", False, "the tokenizer has none"),
        (
            "{{ ''.__class__.__mro__ }}{{ messages[0].content }}",
            "flat",
            False,
            "__class__' of 'str' object is unsafe",
        ),
    ],
)
def test_template_that_cannot_be_expressed_is_rejected_by_name(
    template: str, format_: str, has_prompts: bool, message: str, tmp_path: Path
) -> None:
    source = save_plain(tmp_path, template, format_)
    with pytest.raises(SourceError) as caught:
        render_template(source, has_prompts=has_prompts)
    assert message in str(caught.value)
    assert "which bundles do not support: remove modality_config.message from" in str(caught.value)


def test_template_without_a_system_message_and_structured_messages(tmp_path: Path) -> None:
    structured = SYSTEM + "<s>{% for part in messages[0].content %}{{ part.text }}{% endfor %}{{ eos_token }}"
    source = save_plain(tmp_path, structured, "structured")
    expected = {"before_prompt": "", "before_text": "<s>", "after_text": "</s>"}
    assert render_template(source, has_prompts=False) == {"without_prompt": expected}
    (source / "modules.json").unlink()
    assert render_template(source, has_prompts=False) is None
    assert render_template(None, has_prompts=False) is None


def save_plain(directory: Path, template: str, format_: str) -> Path:
    """Save the files that decide how texts are rendered."""
    source = directory / "source"
    save_decoder(source, template)
    (source / "model.safetensors").unlink()
    edit(source / "modules.json")
    message = {"method": "forward", "method_output_name": "last_hidden_state", "format": format_}
    edit(source / "sentence_bert_config.json", modality_config={"message": message})
    return source
