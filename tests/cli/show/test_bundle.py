"""Reported omitted tensors, for checkpoints saved by transformers."""

from pathlib import Path

import pytest

from attnlens_cli.show.bundle import describe_left_out
from attnlens_model import load_checkpoint
from odd_models import OddModel

ONE_LAYER = {"num_hidden_layers": 1}
T5_SIZES = {"d_model": 96, "d_ff": 160, "num_layers": 1, "num_heads": 3, "d_kv": 32, "num_decoder_layers": 2}


@pytest.mark.parametrize(
    ("name", "kind", "groups"),
    [
        ("Bert", "Model", "pooler (2 tensors)"),
        (
            "Bert",
            "ForSequenceClassification",
            "pooler (2 tensors); task head (2 tensors: classifier.bias, classifier.weight)",
        ),
        (
            "Bert",
            "ForMaskedLM",
            (
                "task head (5 tensors: cls.predictions.bias, cls.predictions.transform.LayerNorm.bias, "
                "cls.predictions.transform.LayerNorm.weight and 2 more)"
            ),
        ),
        (
            "ModernBert",
            "ForMaskedLM",
            "task head (3 tensors: decoder.bias, head.dense.weight, head.norm.weight)",
        ),
        ("T5", "ForConditionalGeneration", "decoder (28 tensors)"),
        (
            "T5",
            "ForSequenceClassification",
            (
                "decoder (28 tensors); task head (4 tensors: classification_head.dense.bias, "
                "classification_head.dense.weight, classification_head.out_proj.bias and 1 more)"
            ),
        ),
    ],
)
def test_omitted_tensors_are_described_in_groups(tmp_path: Path, name: str, kind: str, groups: str) -> None:
    changes = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1}
    model = OddModel(name, ONE_LAYER | changes | (T5_SIZES if name == "T5" else {})).make(kind)
    model.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert describe_left_out(checkpoint.unused_tensors) == (
        f"left out because the encoder's outputs do not depend on them: {groups}"
    )


def test_other_omitted_tensor_is_not_called_a_head() -> None:
    line = describe_left_out(["deberta.embeddings.position_embeddings.weight"])
    assert line.endswith("others (1 tensor: deberta.embeddings.position_embeddings.weight)")
