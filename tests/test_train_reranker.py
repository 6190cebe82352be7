"""The checkpoints and the figures of examples/train_reranker.py."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from trained_heads import STEPS, TrainedHeads

PAIRS = [
    ("A man is playing a guitar.", "Someone plays the guitar."),
    ("A man is playing a guitar.", "A man is playing the piano."),
    ("A man is playing a guitar.", "Shares fell after the quarterly report."),
]
SENTENCES = {
    "A black dog runs through the grass.": "captions",
    "You should ask your advisor before you decide that.": "forums",
    "Shares of the company fell 2.5 percent on Friday after the quarterly report.": "news",
}


def load(directory: Path) -> tuple[Any, Any]:
    """Return model and tokenizer, after checking that the checkpoint has exactly the weights of the model."""
    import transformers  # noqa: PLC0415 - slow import

    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        directory, output_loading_info=True
    )
    assert not any(info.values())
    return model, transformers.AutoTokenizer.from_pretrained(directory)


def logits(directory: Path, *texts: list[str]) -> torch.Tensor:
    model, tokenizer = load(directory)
    with torch.inference_mode():
        found: torch.Tensor = model(**tokenizer(*texts, padding=True, return_tensors="pt")).logits
    return found


def test_losses_fall_and_both_models_beat_their_baselines(trained_heads: TrainedHeads) -> None:
    steps = [
        (int(step), float(loss)) for step, loss in re.findall(r"step (\d+): loss (\S+)", trained_heads.log)
    ]
    reranker, classifier = steps[:10], steps[10:]
    assert [step for step, _ in reranker] == [step for step, _ in classifier] == [*range(15, STEPS + 1, 15)]
    assert reranker[-1][1] < 0.8 * reranker[0][1]
    assert classifier[-1][1] < 0.4 * classifier[0][1]
    figures = [float(figure) for figure in re.findall(r"(?:Spearman|accuracy|F1) (\S+\d)", trained_heads.log)]
    overlap, spearman, majority, majority_f1, accuracy, f1 = figures
    assert overlap == 0.673
    assert spearman > overlap + 0.02
    assert (majority, majority_f1) == (0.417, 0.196)
    assert min(accuracy, f1) > 0.9


def test_reranker_has_the_format_of_sentence_transformers(trained_heads: TrainedHeads) -> None:
    from sentence_transformers import CrossEncoder  # noqa: PLC0415 - slow import

    settings = json.loads((trained_heads.reranker / "config_sentence_transformers.json").read_text())
    assert settings["model_type"] == "CrossEncoder"
    assert settings["activation_fn"] == "torch.nn.modules.activation.Sigmoid"
    assert (trained_heads.reranker / "modules.json").exists()
    expected = logits(trained_heads.reranker, *map(list, zip(*PAIRS, strict=True))).sigmoid()[:, 0].numpy()
    scores = CrossEncoder(str(trained_heads.reranker)).predict(PAIRS)
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert scores[0] > scores[1] > scores[2]
    assert scores[0] > 0.5
    assert scores[2] < 0.2


def test_classifier_names_the_genre_of_a_sentence(trained_heads: TrainedHeads) -> None:
    config = json.loads((trained_heads.classifier / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert config["problem_type"] == "single_label_classification"
    predicted = logits(trained_heads.classifier, [*SENTENCES]).argmax(dim=-1)
    assert [config["id2label"][str(label)] for label in predicted.tolist()] == [*SENTENCES.values()]


def test_no_held_out_sentence_is_trained_on() -> None:
    from examples.train_reranker import read_pairs  # noqa: PLC0415 - slow import

    training, held_out = ({text for pair in pairs for text in pair.texts} for pairs in read_pairs())
    assert training.isdisjoint(held_out)
    assert len(held_out) > 500
    assert len(training) > 2000


def test_training_is_reproducible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples.train_reranker import main  # noqa: PLC0415 - slow import

    logs = []
    for run in ("a", "b"):
        command = ["train_reranker.py", "--steps", "2", "--output", str(tmp_path / run)]
        monkeypatch.setattr(sys, "argv", command)
        main()
        logs.append(capsys.readouterr().out)
    assert logs[0] == logs[1]
    for name in ("reranker", "classifier"):
        first, second = (load_file(tmp_path / run / name / "model.safetensors") for run in ("a", "b"))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)
