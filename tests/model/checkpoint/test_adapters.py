"""Adapters of several tasks, compared with merged weights in `transformers`, and rejected settings."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attnlens_model import CheckpointError, ConfigError, load_checkpoint
from odd_models import OddModel, padded_masks, random_inputs
from oracles.jina_v3 import ODD, TASKS, change_config, write_checkpoint

Merged = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Merged]:
    directory = tmp_path_factory.mktemp("v3")
    return directory, write_checkpoint(directory)


@pytest.fixture
def copied(published: tuple[Path, Merged], tmp_path: Path) -> Path:
    for path in published[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("task", [*TASKS, "none"])
def test_task_matches_the_encoder_with_its_merged_weights(
    task: str, published: tuple[Path, Merged], tmp_path: Path
) -> None:
    directory, merged = published
    checkpoint = load_checkpoint(directory, adapter_task=task)
    assert (checkpoint.adapter_task, checkpoint.config.family) == (task, "jina_v3")
    assert all(name.startswith("roberta.pooler.") for name in checkpoint.unused_tensors)
    model = ODD.make()
    model.save_pretrained(tmp_path)
    save_file(merged[task], tmp_path / "model.safetensors", {"format": "pt"})
    model = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    for mask in padded_masks(4, 40):
        inputs = random_inputs(model.config, mask)
        with torch.no_grad():
            ours = checkpoint.encoder(**inputs).last_hidden_state
            theirs = model(**inputs).last_hidden_state
        assert (ours - theirs)[mask.bool()].abs().max() < 1e-5


def test_tasks_differ_and_their_weights_match_the_formula(published: tuple[Path, Merged]) -> None:
    directory, merged = published
    for task in (TASKS[0], TASKS[4], "none"):
        found = load_checkpoint(directory, adapter_task=task).encoder.state_dict()
        fused = merged[task]["encoder.layers.1.mixer.Wqkv.weight"]
        parts = [found[f"layers.1.attention.{part}.weight"] for part in ("query", "key", "value")]
        assert torch.allclose(torch.cat(parts), fused, rtol=0, atol=1e-6)
        for name, theirs in (
            ("embeddings.token", "embeddings.word_embeddings"),
            ("embeddings.token_type", "embeddings.token_type_embeddings"),
            ("layers.0.feed_forward.down", "encoder.layers.0.mlp.fc2"),
        ):
            assert torch.allclose(
                found[f"{name}.weight"], merged[task][f"{theirs}.weight"], rtol=0, atol=1e-6
            )
    words = [merged[task]["embeddings.word_embeddings.weight"] for task in (*TASKS, "none")]
    assert all(
        (words[one] - words[two]).abs().max() > 0.01 for one in range(6) for two in range(6) if one != two
    )


def test_task_must_be_chosen_where_there_are_some_and_only_there(copied: Path, tmp_path: Path) -> None:
    listed = ", ".join(TASKS)
    with pytest.raises(CheckpointError, match=f"adapters for the tasks {listed}: choose one .*or 'none'"):
        load_checkpoint(copied)
    with pytest.raises(
        CheckpointError, match=f"no adapters for the task 'clustering': choose one of {listed}"
    ):
        load_checkpoint(copied, adapter_task="clustering")
    for odd in (ODD, OddModel("Bert", {"num_hidden_layers": 1})):
        odd.make().save_pretrained(tmp_path / odd.name)
        assert load_checkpoint(tmp_path / odd.name).adapter_task == ""
        with pytest.raises(CheckpointError, match="no task adapters, but the task 'none' was specified"):
            load_checkpoint(tmp_path / odd.name, adapter_task="none")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_adaptations": None}, "lora_adaptations=None must be the list of tasks"),
        ({"lora_adaptations": []}, r"lora_adaptations=\[\] must be the list"),
        ({"lora_rank": 0}, "lora_rank=0 must be a number greater than 0"),
        ({"lora_alpha": "1"}, "lora_alpha='1' must be a number greater than 0"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type='alibi' is not supported"),
        ({"is_decoder": True}, "is_decoder=True is not supported: only False is"),
    ],
)
def test_invalid_adapter_settings_are_named(changes: dict[str, Any], message: str, copied: Path) -> None:
    change_config(copied, changes)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(copied, adapter_task=TASKS[0])


def test_missing_rank_and_alpha_default_to_those_of_the_publisher(copied: Path) -> None:
    before = load_checkpoint(copied, adapter_task="separation").encoder.state_dict()
    base = load_checkpoint(copied, adapter_task="none").encoder.state_dict()
    change_config(copied, {"lora_rank": None, "lora_alpha": None})
    after = load_checkpoint(copied, adapter_task="separation").encoder.state_dict()
    name = "layers.0.feed_forward.up.weight"
    # alpha / rank: 2 / 3 in the file, 1 / 4 in the class.
    assert torch.allclose((after[name] - base[name]) * 8 / 3, before[name] - base[name], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, _b: {"lora_A": a[:4]}, r"do not match its weight \(160, 96\) and 5 tasks: .*\(4, 3, 96\)"),
        (lambda a, _b: {"lora_A": a[:, :2].contiguous()}, r"have the shapes \(5, 2, 96\), \(5, 160, 3\)"),
        (lambda a, b: {"lora_A": b, "lora_B": a}, r"have the shapes \(5, 160, 3\), \(5, 3, 96\)"),
        (lambda _a, _b: {"lora_B": None}, r"have the shapes \(5, 3, 96\), missing"),
        (lambda a, _b: {"lora_A": a * math.nan}, "the weights contain NaN or infinite values"),
    ],
)
def test_adapters_that_do_not_fit_are_named(change: Any, message: str, copied: Path) -> None:
    tensors: dict[str, Tensor | None] = dict(load_file(copied / "model.safetensors"))
    prefix = "roberta.encoder.layers.1.mlp.fc1.parametrizations.weight.0"
    changed = change(tensors[f"{prefix}.lora_A"], tensors[f"{prefix}.lora_B"])
    tensors |= {f"{prefix}.{name}": tensor for name, tensor in changed.items()}
    kept = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, copied / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(copied, adapter_task="classification")
