"""Values that a checkpoint stores twice, or that the encoder computes: they must agree."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from attnlens_model import CheckpointError, load_checkpoint
from odd_models import OddModel

T5_SIZES = {"d_ff": 40, "d_kv": 32, "n_positions": 64, "num_hidden_layers": 1}
T5 = OddModel("T5", T5_SIZES, kind="EncoderModel")
UMT5 = OddModel("UMT5", T5_SIZES, kind="EncoderModel")
ROFORMER = OddModel("RoFormer", {"num_hidden_layers": 1})
BERT = OddModel("Bert", {"num_hidden_layers": 1})
SHARED, ENCODERS = "shared.weight", "encoder.embed_tokens.weight"

Tensors = dict[str, Tensor]


def adding(stored: Tensors) -> Callable[[Tensors], Tensors]:
    """Return a change that stores these tensors too, or instead."""
    return lambda tensors: tensors | stored


def load(odd: OddModel, directory: Path, change: Callable[[Tensors], Tensors] = dict) -> dict[str, Tensor]:
    """Return the parameters of an encoder whose checkpoint was changed."""
    odd.make().save_pretrained(directory)
    path = directory / "model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load_file(path)), path)
    parameters: dict[str, Tensor] = load_checkpoint(directory).encoder.state_dict()
    return parameters


@pytest.mark.parametrize("odd", [T5, UMT5], ids=str)
def test_embeddings_may_be_stored_under_either_name_or_both(odd: OddModel, tmp_path: Path) -> None:
    expected = load(odd, tmp_path)
    changes: list[Callable[[Tensors], Tensors]] = [
        lambda tensors: tensors | {ENCODERS: tensors[SHARED].clone()},
        lambda tensors: {ENCODERS if name == SHARED else name: tensor for name, tensor in tensors.items()},
    ]
    for change in changes:
        found = load(odd, tmp_path, change)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("odd", [T5, UMT5], ids=str)
def test_two_embeddings_that_differ_are_rejected(odd: OddModel, tmp_path: Path) -> None:
    def one_bit(tensors: Tensors) -> Tensors:
        other = tensors[SHARED].clone()
        other[-1, -1] = torch.nextafter(other[-1, -1], torch.tensor(9.0))
        return tensors | {ENCODERS: other}

    changes: list[Callable[[Tensors], Tensors]] = [
        one_bit,
        lambda tensors: tensors | {ENCODERS: tensors[SHARED].double()},
        lambda tensors: tensors | {ENCODERS: tensors[SHARED][1:].clone()},
    ]
    for change in changes:
        with pytest.raises(CheckpointError, match=r"(shared\.weight and encoder|weight and shared).* differ"):
            load(odd, tmp_path, change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_position_table_must_match_the_encoder(dtype: torch.dtype, tmp_path: Path) -> None:
    table = "encoder.embed_positions.weight"
    load(ROFORMER, tmp_path, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})

    def change(tensors: Tensors) -> Tensors:
        tensors[table][40, 3] += 0.02
        return {name: tensor.to(dtype) for name, tensor in tensors.items()}

    changes: list[Callable[[Tensors], Tensors]] = [
        change,
        lambda tensors: tensors | {table: tensors[table].flip(0).contiguous()},
        lambda tensors: tensors | {table: tensors[table][:-1].contiguous()},
    ]
    for each in changes:
        with pytest.raises(
            CheckpointError, match=r"embed_positions\.weight differs from the values computed"
        ):
            load(ROFORMER, tmp_path, each)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float16])
def test_stored_position_and_type_ids_are_the_usual_ones(dtype: torch.dtype, tmp_path: Path) -> None:
    positions = torch.arange(64)[None].to(dtype)
    types = torch.zeros(1, 64, dtype=dtype)
    stored = {"embeddings.position_ids": positions, "embeddings.token_type_ids": types}
    load(BERT, tmp_path, adding(stored))
    for name, values in stored.items():
        with pytest.raises(CheckpointError, match=f"{name} differs from the values"):
            load(BERT, tmp_path, adding({name: values + 1}))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_git_lfs_pointer_is_recognized(name: str, tmp_path: Path) -> None:
    BERT.make().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    oid = f"oid sha256:{'0' * 64}"
    (tmp_path / name).write_text(f"version https://git-lfs.github.com/spec/v1\n{oid}\nsize 90868376\n")
    with pytest.raises(CheckpointError, match=rf"{name} is a Git LFS pointer, .*: run `git lfs pull` in "):
        load_checkpoint(tmp_path)


def test_index_selects_the_shard_of_a_tensor(tmp_path: Path) -> None:
    expected = load(BERT, tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    stale = {name: tensor + 1 for name, tensor in tensors.items()}
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {"pooler.dense.bias": "b.safetensors"}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    safetensors.torch.save_file(stale, tmp_path / "b.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = load_checkpoint(tmp_path).encoder.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
