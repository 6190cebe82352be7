"""Rejected models: the message describes the model and the remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from attnlens_model import CheckpointError, ConfigError, EncoderConfig, ModelError, load_checkpoint
from odd_models import OddModel


def test_type_of_transformers_needs_a_checkpoint() -> None:
    with pytest.raises(ConfigError, match=r"'qwen3' is none of attnlens, bert, .* of a checkpoint is needed"):
        EncoderConfig.from_dict({"model_type": "qwen3", "hidden_size": 8})


@pytest.mark.parametrize(("model_type", "nearest"), [("qwen4", "qwen"), ("nomic_berd", "nomic_bert")])
def test_similar_type_is_named(model_type: str, nearest: str, tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"model_type": model_type})
    with pytest.raises(ConfigError, match=f"'{model_type}' is not known \\(did you mean '{nearest}"):
        load_checkpoint(tmp_path)


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def modules(*kinds: tuple[str, str]) -> list[dict[str, str]]:
    return [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", {"base_model_name_or_path": "org/base"}, r"an adapter \(PEFT\) for org/base"),
        ("adapter_config.json", {}, r"an adapter \(PEFT\) for its base model, .* merge_and_unload\(\)"),
        ("modules.json", modules(("StaticEmbedding", "")), "a static embedding table"),
        ("modules.json", modules(("CLIPModel", "0_CLIPModel")), "a multimodal model of images and text"),
        (
            "modules.json",
            modules(("Transformer", "0_Transformer")),
            "has its encoder in the subdirectory 0_Transformer",
        ),
        ("modules.json", modules(("Transformer", "")), "contains no config.json"),
        ("modules.json", ["Transformer"], "contains no config.json"),
        ("README.md", "", "contains no config.json: specify the directory of one model"),
    ],
)
def test_directory_without_a_whole_model_is_named(
    name: str, content: object, message: str, tmp_path: Path
) -> None:
    write(tmp_path / name, content)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_encoder_in_a_subdirectory_is_not_confused_with_the_one_in_the_root(tmp_path: Path) -> None:
    OddModel("Bert", {"num_hidden_layers": 1}).make().save_pretrained(tmp_path)
    write(tmp_path / "modules.json", modules(("Transformer", "")))
    load_checkpoint(tmp_path)
    write(tmp_path / "modules.json", modules(("Transformer", "0_Transformer")))
    with pytest.raises(CheckpointError, match="has its encoder in the subdirectory 0_Transformer"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"quantization_config": {"quant_method": "bitnet"}},
            "sets quantization_config, and quantized models",
        ),
        ({"text_config": {"quantization_config": {"bits": 4}}}, "sets quantization_config"),
        ({"transformers_weights": "other.safetensors"}, "sets transformers_weights = 'other.safetensors'"),
    ],
)
def test_setting_that_selects_other_weights_is_rejected(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    OddModel("Bert", {"num_hidden_layers": 1}).make().save_pretrained(tmp_path)
    published = json.loads((tmp_path / "config.json").read_text("utf-8"))
    without = {"quantization_config": None, "transformers_weights": None}
    write(tmp_path / "config.json", published | without)
    load_checkpoint(tmp_path)
    write(tmp_path / "config.json", published | change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_transformers_loads_the_weights_that_the_rejected_setting_names(tmp_path: Path) -> None:
    """The reason for the rejection: model.safetensors would be other weights."""
    odd = OddModel("Bert", {"num_hidden_layers": 1})
    odd.make(seed=1).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    first = odd.make(seed=2)
    first.save_pretrained(tmp_path)
    published = json.loads((tmp_path / "config.json").read_text("utf-8"))
    write(tmp_path / "config.json", published | {"transformers_weights": "other.safetensors"})
    loaded = AutoModel.from_pretrained(tmp_path)
    assert not torch.equal(loaded.pooler.dense.weight, first.pooler.dense.weight)


def test_adapter_beside_its_base_model_is_not_omitted_silently(tmp_path: Path) -> None:
    OddModel("Bert", {"num_hidden_layers": 1}).make().save_pretrained(tmp_path)
    assert not load_checkpoint(tmp_path).has_own_code
    write(tmp_path / "adapter_config.json", {"base_model_name_or_path": "org/base"})
    with pytest.raises(CheckpointError, match="an adapter"):
        load_checkpoint(tmp_path)


def test_custom_code_that_is_not_executed_is_reported(tmp_path: Path) -> None:
    OddModel("Bert", {"num_hidden_layers": 1}).make().save_pretrained(tmp_path)
    published: dict[str, Any] = json.loads((tmp_path / "config.json").read_text("utf-8"))
    published["auto_map"] = {"AutoModel": "modeling_bert.JinaBertModel"}
    write(tmp_path / "config.json", published)
    assert load_checkpoint(tmp_path).has_own_code
    note = "custom code, to which auto_map in config.json refers, is not executed"
    write(tmp_path / "config.json", published | {"position_embedding_type": "relative_key"})
    with pytest.raises(ConfigError, match="position_embedding_type='relative_key' is not supp") as caught:
        load_checkpoint(tmp_path)
    assert caught.value.__notes__ == [note]
    write(tmp_path / "config.json", published)
    torch.save({"other.weight": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights of the bert family") as other:
        load_checkpoint(tmp_path)
    assert other.value.__notes__ == [note]


@pytest.mark.parametrize("key", ["architectures", "num_hidden_layers", "hidden_act"])
def test_hugging_face_file_without_model_type_is_recognized(key: str) -> None:
    content = {"vocab_size": 101, "hidden_size": 48, key: 2}
    with pytest.raises(ConfigError, match=f"^{key} is a key of a Hugging Face config.json.*model_type: add"):
        EncoderConfig.from_dict(content)
