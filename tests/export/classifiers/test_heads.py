"""Heads of every family, compared with `transformers`, and heads that are refused."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder

from attnlens.v1.manifest_pb2 import Activation
from attnlens_export import SourceError
from attnlens_export.classification import HeadReference
from attnlens_export.published.choices import AttentionChoices
from attnlens_export.published.classifier import (
    LAYOUTS,
    find_classifier,
    read_activation,
    read_head,
    read_labels,
    write_head,
)
from attnlens_export.published.heads import find_head
from attnlens_model import load_checkpoint
from family_cases import GROUPS
from odd_models import OddModel, padded_masks, random_inputs
from small_bundles import TOKENIZERS

KIND = "ForSequenceClassification"
# Named after the code on the hub, which transformers does not have.
NOT_IN_TRANSFORMERS = {"New"}
POOLINGS: dict[str, list[dict[str, Any]]] = {
    "EuroBert": [{"classifier_pooling": "bos"}, {"classifier_pooling": "mean"}],
    "ModernBert": [
        {"classifier_pooling": "cls", "classifier_bias": True, "norm_bias": True},
        {"classifier_pooling": "mean", "norm_eps": 1e-3, "classifier_activation": "silu"},
    ],
    "Ultrabert": [{"classifier_pooling": "cls"}, {"classifier_pooling": "mean"}],
    "DebertaV2": [{"pooler_hidden_act": "gelu"}, {"pooler_hidden_act": "tanh"}],
}


def classifiers() -> list[OddModel]:
    """Return a model for each layout and each of its settings."""
    first: dict[str, OddModel] = {}
    for model in (model for group in GROUPS for model in [*group.models, *group.traced]):
        if model.source.__name__ == "transformers" and hasattr(transformers, model.name + KIND):
            first.setdefault(model.name, model)
    first.setdefault("Bert", OddModel("Bert"))
    return [
        replace(model, changes=model.changes | {"num_labels": 3} | changes)
        for name, model in first.items()
        if name in LAYOUTS
        for changes in POOLINGS.get(name, [{}])
    ]


LONGFORMER = OddModel(
    "Longformer", {"num_labels": 3, "attention_window": [4] * 3, "pad_token_id": 1, "type_vocab_size": 1}, 32
)


# Their layouts follow from their tensors.
DERIVED = [
    OddModel("Esm", {"num_labels": 3, "pad_token_id": 1, "position_embedding_type": "rotary"}),
    OddModel("RoCBert", {"num_labels": 3, "pronunciation_vocab_size": 50, "shape_vocab_size": 60}),
    OddModel("LayoutLM", {"num_labels": 3}),
    OddModel("XLM", {"num_labels": 3, "pad_token_id": 2, "summary_activation": "tanh"}),
    OddModel("Flaubert", {"num_labels": 3}),
]


def saved(odd: OddModel, directory: Path) -> Any:
    model = odd.make(KIND)
    model.save_pretrained(directory)
    return model


def test_every_layout_is_compared() -> None:
    assert {odd.name for odd in [*classifiers(), LONGFORMER]} == LAYOUTS.keys() - NOT_IN_TRANSFORMERS


@pytest.mark.parametrize("odd", [*classifiers(), LONGFORMER, *DERIVED], ids=str)
def test_logits_equal_those_of_transformers(odd: OddModel, tmp_path: Path) -> None:
    model = saved(odd, tmp_path / "source")
    # transformers makes the first token of a classified text global.
    choices = AttentionChoices(1 if odd is LONGFORMER else None, None)
    checkpoint = load_checkpoint(tmp_path / "source", None, choices.applied)
    layout = find_classifier(tmp_path / "source", checkpoint.unused_tensors)
    assert layout is not None
    head = read_head(tmp_path / "source", layout, checkpoint.config.vector_size)
    write_head(tmp_path / "bundle", head)
    reference = HeadReference(tmp_path / "bundle", checkpoint.config.vector_size)
    _, mask, *_ = padded_masks(3, min(odd.num_tokens, 20))
    inputs = random_inputs(model.config, mask)
    with torch.no_grad():
        expected = model(**inputs).logits.numpy()
        hidden = checkpoint.encoder(**inputs).last_hidden_state.numpy()
    found = reference.logits(hidden, mask.numpy(), torch.float32)
    assert list(head.classifier.labels) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert abs(found - expected).max() < 1e-5 * max(1.0, abs(expected).max())
    assert expected.std() > 0.01  # not constant


SEQUENCE_CLASSIFICATION = {
    "transformer_task": "sequence-classification",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "scores",
}
BERT = OddModel("Bert", {"num_labels": 2, "num_hidden_layers": 1})


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    saved(BERT, tmp_path)
    return tmp_path


def change(directory: Path, values: Mapping[str, object], name: str = "config.json") -> None:
    path = directory / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | dict(values)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"id2label": {"0": "a"}}, "names 1 labels, but classifier returns 2 logits: correct id2label"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label must map the indices 0, 1"),
        ({"id2label": ["a", "b"]}, "id2label must map the indices 0, 1"),
        (
            {"sbert_ce_default_activation_function": "my.Own"},
            "computes scores with 'my.Own', but bundles support only Identity, Sigmoid, Softmax",
        ),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.Mish"}},
            "computes scores with 'torch.nn.Mish'",
        ),
    ],
)
def test_settings_that_a_bundle_can_not_express_are_refused(
    bert: Path, values: dict[str, object], message: str
) -> None:
    change(bert, values)
    layout = find_classifier(bert)
    assert layout is not None
    with pytest.raises(SourceError, match=message):
        read_head(bert, layout, 96)


def test_missing_tensors_and_poolings_are_refused(tmp_path: Path) -> None:
    BERT.make("Model").save_pretrained(tmp_path)
    change(tmp_path, {"architectures": ["BertForSequenceClassification"]})
    with pytest.raises(
        SourceError, match=r"classification head of the checkpoint lacks bert.pooler.dense.weight"
    ):
        read_head(tmp_path, LAYOUTS["Bert"], 96)
    with pytest.raises(
        SourceError, match="pooling of the head is classifier_pooling = 'late', but bundles support only cls"
    ):
        read_head(tmp_path, LAYOUTS["EuroBert"], 96)


def test_labels_are_in_the_order_of_their_numbers() -> None:
    assert read_labels({"id2label": {"1": "b", "0": "a", "2": "a"}}) == ["a", "b", "a"]
    assert read_labels({}) == ["LABEL_0", "LABEL_1"]
    assert read_labels({"num_labels": 1}) == ["LABEL_0"]


IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
OLDEST = "sbert_ce_default_activation_function"
CROSS_ENCODER = {"model_type": "CrossEncoder"}


@pytest.mark.parametrize(
    ("config", "published", "num_labels"),
    [
        ({}, {}, 1),
        ({}, CROSS_ENCODER, 1),
        ({}, CROSS_ENCODER, 3),
        ({"problem_type": "regression"}, CROSS_ENCODER, 1),
        ({"problem_type": "multi_label_classification"}, CROSS_ENCODER, 3),
        ({}, CROSS_ENCODER | {"activation_fn": "torch.nn.modules.activation.Softmax"}, 3),
        ({OLDEST: IDENTITY}, {}, 1),
        ({OLDEST: "torch.nn.Identity"}, CROSS_ENCODER | {"activation_fn": None}, 1),
        ({OLDEST: SIGMOID}, {}, 3),
        ({"sentence_transformers": {"version": "5.0.0"}}, {}, 3),
        ({"sentence_transformers": {"version": "5.0.0"}, OLDEST: IDENTITY}, {}, 1),
        ({"sentence_transformers": {"activation_fn": None}, OLDEST: IDENTITY}, {}, 1),
        ({"sentence_transformers": {"activation_fn": SIGMOID}, OLDEST: IDENTITY}, {}, 1),
        (
            {"sentence_transformers": {"activation_fn": SIGMOID}},
            CROSS_ENCODER | {"activation_fn": IDENTITY},
            1,
        ),
        ({}, {"activation_fn": IDENTITY}, 1),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_activation_is_that_of_a_cross_encoder(
    tmp_path: Path, config: dict[str, object], published: dict[str, object], num_labels: int
) -> None:
    changes = {"num_labels": num_labels, "num_hidden_layers": 1}
    saved(OddModel("Bert", changes), tmp_path)
    shutil.copytree(TOKENIZERS / "wordpiece", tmp_path, dirs_exist_ok=True)
    change(tmp_path, config)
    if published:
        change(tmp_path, published, "config_sentence_transformers.json")
        kind = "sentence_transformers.base.modules.transformer.Transformer"
        (tmp_path / "modules.json").write_text(
            json.dumps([{"idx": 0, "name": "0", "path": "", "type": kind}])
        )
        change(tmp_path, SEQUENCE_CLASSIFICATION, "sentence_bert_config.json")
    expected = type(CrossEncoder(str(tmp_path), device="cpu").activation_fn).__name__.upper()
    assert read_activation(tmp_path, num_labels) == Activation.Value(f"ACTIVATION_{expected}")


@pytest.mark.parametrize(
    ("config", "num_labels", "expected"),
    [
        ({}, 3, "SOFTMAX"),
        ({"problem_type": "single_label_classification"}, 2, "SOFTMAX"),
        ({"problem_type": "multi_label_classification"}, 3, "SIGMOID"),
        ({"problem_type": "regression"}, 1, "IDENTITY"),
        ({"problem_type": "regression"}, 3, "IDENTITY"),
    ],
)
def test_activation_of_a_classifier_is_that_of_a_pipeline(
    tmp_path: Path, config: dict[str, object], num_labels: int, expected: str
) -> None:
    model = saved(OddModel("Bert", {"num_labels": num_labels, "num_hidden_layers": 1} | config), tmp_path)
    assert read_activation(tmp_path, num_labels) == Activation.Value(f"ACTIVATION_{expected}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZERS / "wordpiece")
    make: Any = transformers.TextClassificationPipeline
    pipeline = make(model=model, tokenizer=tokenizer)
    logits, scores = (
        {
            entry["label"]: entry["score"]
            for entry in pipeline("w1 w2", top_k=None, function_to_apply=function)
        }
        for function in ("none", None)
    )
    values = torch.tensor([logits[label] for label in model.config.id2label.values()])
    functions: dict[str, Any] = {
        "SOFTMAX": torch.softmax,
        "SIGMOID": lambda x, _: x.sigmoid(),
        "IDENTITY": lambda x, _: x,
    }
    ours = functions[expected](values, -1)
    assert [scores[label] for label in logits] == pytest.approx(
        [float(ours[model.config.label2id[label]]) for label in logits], abs=1e-6
    )


def test_listwise_and_generative_rerankers_are_refused_with_a_remedy(tmp_path: Path) -> None:
    change(tmp_path, {"architectures": ["JinaForRanking"]})
    listwise = find_head(tmp_path, ())
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "1_LogitScore", "type": kind}]))
    generative = find_head(tmp_path, ())
    assert listwise is not None
    assert (
        listwise.describe()
        == "this checkpoint is a listwise reranker, in which documents attend to each other"
    )
    assert listwise.remedy == "export a reranker that scores one pair at a time"
    assert generative is not None
    assert "whose score.weight is the difference between the rows of these tokens" in generative.remedy


def test_modules_after_the_head_are_refused(bert: Path) -> None:
    types = [
        f"sentence_transformers.base.modules.{name}" for name in ("transformer.Transformer", "dense.Dense")
    ]
    (bert / "modules.json").write_text(json.dumps([{"path": "", "type": name} for name in types]))
    with pytest.raises(SourceError, match="has the module Dense after its classification head"):
        read_head(bert, LAYOUTS["Bert"], 96)


def test_page_of_families_lists_every_layout() -> None:
    page = (Path(__file__).parents[3] / "docs" / "families.md").read_text("utf-8")
    table = page.partition("## Classification heads")[2].partition("\nWith random weights")[0]
    listed = [
        name for line in table.splitlines() if line.startswith("| `") for name in line.split("|")[1].split()
    ]
    assert sorted(name.strip("`,") for name in listed) == sorted(LAYOUTS)
