"""File layouts and tensor names of checkpoints, and all kinds of mismatches."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModel, BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel

from attnlens_model import CheckpointError, ConfigError, Encoder, ModuleEncoder, load_checkpoint
from attnlens_model.checkpoint import fitting
from attnlens_model.families import FAMILIES
from odd_models import OddModel

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 16,
}
LAYER = {"num_hidden_layers": 1, "pad_token_id": 1}
IDS = torch.arange(20).view(2, 10)

Tensors = dict[str, Tensor]


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A directory as `BertModel.save_pretrained` writes it."""
    directory = tmp_path / "my-bert"
    bert().save_pretrained(directory)
    return directory


def bert(kind: Any = BertModel) -> Any:
    torch.manual_seed(0)
    return kind(BertConfig(**SIZES)).eval()


def read(directory: Path) -> Tensors:
    return safetensors.torch.load_file(directory / "model.safetensors")


def rewrite(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = {name: tensor.clone() for name, tensor in read(directory).items()}
    safetensors.torch.save_file(change(tensors), directory / "model.safetensors")


@pytest.mark.parametrize(
    ("odd", "key", "message"),
    [
        (OddModel("Bert", LAYER), "is_causal", "sets is_causal, but this type is bidirectional"),
        (
            OddModel("Esm", LAYER | {"position_embedding_type": "rotary"}),
            "is_causal",
            "it is bidirectional for texts with padding alone: remove is_causal",
        ),
        (
            OddModel("Gemma", LAYER | {"num_key_value_heads": 1, "head_dim": 32}),
            "use_bidirectional_attention",
            "it is causal for texts with padding alone: remove is_causal or use_bidirectional_attention",
        ),
    ],
    ids=str,
)
def test_setting_that_applies_to_texts_without_padding_alone_is_rejected(
    odd: OddModel, key: str, message: str, tmp_path: Path
) -> None:
    odd.make().save_pretrained(tmp_path)
    load_checkpoint(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(content | {key: True}), "utf-8")
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(tmp_path)
    model = AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        alone = model(IDS, attention_mask=torch.ones_like(IDS)).last_hidden_state
        mask = pad(torch.ones_like(IDS), (0, 1))
        padded = model(pad(IDS, (0, 1)), attention_mask=mask).last_hidden_state[:, :-1]
    assert (alone - padded).abs().max() > 0.1


def hidden_states(encoder: Encoder | ModuleEncoder) -> Tensor:
    with torch.no_grad():
        hidden: Tensor = encoder(IDS, torch.ones_like(IDS)).last_hidden_state
    return hidden


def loads_the_same(directory: Path) -> bool:
    with torch.no_grad():
        expected = bert()(IDS).last_hidden_state
    return float((hidden_states(load_checkpoint(directory).encoder) - expected).abs().max()) < 1e-5


def test_loaded_encoder_is_ready_to_use_and_can_still_be_trained(published: Path) -> None:
    checkpoint = load_checkpoint(str(published))
    assert not checkpoint.encoder.training
    assert {p.dtype for p in checkpoint.encoder.parameters()} == {torch.float32}
    assert {p.device.type for p in checkpoint.encoder.parameters()} == {"cpu"}
    assert all(p.requires_grad and p.is_contiguous() for p in checkpoint.encoder.parameters())
    assert checkpoint.source == "my-bert"
    assert checkpoint.directory == published
    assert loads_the_same(published)


def test_loaded_encoder_does_not_change_when_its_file_does(published: Path) -> None:
    encoder = load_checkpoint(published).encoder
    before = hidden_states(encoder)
    size = (published / "model.safetensors").stat().st_size
    with (published / "model.safetensors").open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\x7f" * (size - size // 2))
    assert torch.equal(hidden_states(encoder), before)


def test_copied_tensors_do_not_map_the_file(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped pages that were read are memory of the process: a large file would be held twice."""
    (published / "model.safetensors").unlink()
    bert().save_pretrained(published, max_shard_size="40KB")
    is_finite = fitting._is_finite
    seen = []

    def checked(copied: Tensor) -> bool:
        assert str(published) not in Path("/proc/self/maps").read_text()
        seen.append(copied)
        return is_finite(copied)

    monkeypatch.setattr(fitting, "_is_finite", checked)
    assert len(list(load_checkpoint(published).encoder.parameters())) == len(seen)


def test_sharded_safetensors(published: Path) -> None:
    (published / "model.safetensors").unlink()
    bert().save_pretrained(published, max_shard_size="10KB")
    assert len(list(published.glob("model-*.safetensors"))) > 2
    assert loads_the_same(published)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_pickled_weights(published: Path, zipped: bool) -> None:
    torch.save(read(published), published / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    (published / "model.safetensors").unlink()
    assert loads_the_same(published)


def test_sharded_pickled_weights(published: Path) -> None:
    shards: list[Tensors] = [{}, {}]
    weight_map = {}
    for number, (name, tensor) in enumerate(read(published).items()):
        shards[number % 2][name] = tensor
        weight_map[name] = f"pytorch_model-{number % 2}.bin"
    for number, shard in enumerate(shards):
        torch.save(shard, published / f"pytorch_model-{number}.bin")
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (published / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (published / "model.safetensors").unlink()
    assert loads_the_same(published)


@pytest.mark.parametrize(
    ("kind", "unused"),
    [
        (BertForSequenceClassification, {"classifier.weight", "bert.pooler.dense.weight"}),
        (BertForMaskedLM, {"cls.predictions.bias", "cls.predictions.transform.LayerNorm.weight"}),
    ],
)
def test_task_model_loads_and_its_head_is_reported(tmp_path: Path, kind: Any, unused: set[str]) -> None:
    model = bert(kind)
    model.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    with torch.no_grad():
        expected = model.bert(IDS).last_hidden_state
    assert (hidden_states(checkpoint.encoder) - expected).abs().max() < 1e-5
    assert unused <= set(checkpoint.unused_tensors)
    assert not any("encoder" in name for name in checkpoint.unused_tensors)


@pytest.mark.parametrize("prefix", FAMILIES["bert"].prefixes)
def test_every_declared_prefix_is_understood(published: Path, prefix: str) -> None:
    rewrite(published, lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()})
    assert loads_the_same(published)
    assert load_checkpoint(published).unused_tensors == (
        f"{prefix}pooler.dense.bias",
        f"{prefix}pooler.dense.weight",
    )


def test_legacy_names_and_buffers_are_understood(published: Path) -> None:
    def legacy(tensors: Tensors) -> Tensors:
        renamed = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): tensor
            for name, tensor in tensors.items()
        }
        return renamed | {"embeddings.position_ids": torch.arange(16)[None]}

    rewrite(published, legacy)
    assert loads_the_same(published)
    assert not any("position_ids" in name for name in load_checkpoint(published).unused_tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_dtypes_become_fp32(published: Path, dtype: torch.dtype) -> None:
    before = load_checkpoint(published).encoder.state_dict()
    rewrite(published, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    after = load_checkpoint(published).encoder.state_dict()
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert all(torch.equal(after[name], before[name].to(dtype).float()) for name in before)


def test_causal_encoder_has_its_positions_after_loading(published: Path) -> None:
    config = json.loads((published / "config.json").read_text()) | {"is_decoder": True}
    (published / "config.json").write_text(json.dumps(config))
    encoder = load_checkpoint(published).encoder
    assert isinstance(encoder, Encoder)
    assert encoder.positions.tolist() == list(range(16))


def test_table_of_bert_names_every_parameter(published: Path) -> None:
    parameters = load_checkpoint(published).encoder.state_dict()
    (layout,) = FAMILIES["bert"].layouts
    assert {name for names, _ in layout.weight_names(2, parameters) for name in names} == set(parameters)


def test_all_mismatches_are_reported_together(published: Path) -> None:
    def damage(tensors: Tensors) -> Tensors:
        del tensors["encoder.layer.1.output.dense.bias"]
        del tensors["embeddings.LayerNorm.weight"]
        tensors["encoder.layer.0.attention.self.query.weight"] = torch.zeros(24, 25)
        tensors["encoder.layer.0.output.dense.weight"] = torch.zeros(24, 40, dtype=torch.int8)
        tensors["encoder.layer.0.attention.self.query.lora_A"] = torch.zeros(2)
        return tensors

    rewrite(published, damage)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(published)
    for part in (
        "2 missing: ",
        "encoder.layer.1.output.dense.bias",
        "embeddings.LayerNorm.weight",
        "1 unexpected: encoder.layer.0.attention.self.query.lora_A",
        "2 misshapen: ",
        "encoder.layer.0.attention.self.query.weight (24, 25) instead of (24, 24)",
        "encoder.layer.0.output.dense.weight torch.int8 instead of floating point",
    ):
        assert part in str(caught.value)


def test_long_list_of_misfits_is_cut_with_a_count(published: Path) -> None:
    rewrite(
        published, lambda tensors: {n: t for n, t in tensors.items() if not n.startswith("encoder.layer.1.")}
    )
    with pytest.raises(CheckpointError, match=r"16 missing: encoder\.layer\.1\.[^;]* and 6 more") as caught:
        load_checkpoint(published)
    assert str(caught.value).count("encoder.layer.1.") == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 1}, r"16 unexpected: encoder\.layer\.1\."),
        ({"type_vocab_size": 0}, r"1 unexpected: embeddings\.token_type_embeddings\.weight"),
        ({"type_vocab_size": 1}, r"token_type_embeddings\.weight \(2, 24\) instead of \(1, 24\)"),
        ({"vocab_size": 61}, r"word_embeddings\.weight \(60, 24\) instead of \(61, 24\)"),
    ],
)
def test_config_that_disagrees_with_the_weights_is_rejected(
    published: Path, changes: dict[str, object], message: str
) -> None:
    config = json.loads((published / "config.json").read_text()) | changes
    (published / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(published)


def test_weights_of_another_family_or_of_two_encoders_are_rejected(published: Path) -> None:
    rewrite(published, lambda tensors: tensors | {f"bert.{n}": t.clone() for n, t in tensors.items()})
    with pytest.raises(CheckpointError, match="more than one encoder"):
        load_checkpoint(published)
    rewrite(published, lambda _: {"transformer.wte.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match="no weights of the bert family"):
        load_checkpoint(published)


def test_tensor_with_other_values_under_its_old_name_is_rejected(published: Path) -> None:
    rewrite(published, lambda tensors: tensors | {"embeddings.LayerNorm.gamma": torch.zeros(24)})
    with pytest.raises(CheckpointError, match=r"embeddings\.LayerNorm\.(gamma|weight) are two names"):
        load_checkpoint(published)


@pytest.mark.parametrize(
    "values", [torch.tensor(torch.nan), torch.tensor(-torch.inf), torch.tensor(1e300, dtype=torch.float64)]
)
def test_non_finite_weights_are_rejected_by_name(published: Path, values: Tensor) -> None:
    def damage(tensors: Tensors) -> Tensors:
        table = tensors["embeddings.word_embeddings.weight"].to(values.dtype)
        table[59, 3] = values
        return tensors | {"embeddings.word_embeddings.weight": table}

    rewrite(published, damage)
    with pytest.raises(
        CheckpointError, match=r"word_embeddings\.weight: the weights contain NaN or infinite"
    ):
        load_checkpoint(published)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("part", [0.02, 0.1, 0.5, 0.9, 0.99])
def test_truncated_pickled_weights_are_rejected(published: Path, part: float, zipped: bool) -> None:
    path = published / "pytorch_model.bin"
    torch.save(read(published), path, _use_new_zipfile_serialization=zipped)
    (published / "model.safetensors").unlink()
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin is damaged.*(download it again|convert it)"
    ):
        load_checkpoint(published)


@pytest.mark.parametrize("start", [0, 100, 500])
def test_pickled_weights_with_wrong_bytes_are_one_kind_of_error(published: Path, start: int) -> None:
    path = published / "pytorch_model.bin"
    torch.save(read(published), path)
    (published / "model.safetensors").unlink()
    whole = path.read_bytes()
    for offset in range(start, start + 60):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x55]) + whole[offset + 1 :])
        try:
            load_checkpoint(published)
        except CheckpointError as error:
            assert "pytorch_model.bin" in str(error) or "weights" in str(error)


@pytest.mark.parametrize("change", [Tensor.to_sparse, lambda tensor: tensor.to("meta")])
def test_tensor_without_plain_values_is_rejected(published: Path, change: Callable[[Tensor], Tensor]) -> None:
    tensors = read(published)
    name = "embeddings.word_embeddings.weight"
    torch.save(tensors | {name: change(tensors[name])}, published / "pytorch_model.bin")
    (published / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"{name} without dense values"):
        load_checkpoint(published)


def test_incomplete_directory_is_rejected(published: Path) -> None:
    config = (published / "config.json").read_text()
    (published / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"my-bert contains no config\.json: specify the directory"):
        load_checkpoint(published)
    (published / "config.json").write_text(config)
    (published / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"contains no weights: none of model\.safetensors, .*bin"):
        load_checkpoint(published)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("content", [b"", b"not tensors at all", b"PK\x03\x04" + b"\0" * 64])
def test_damaged_file_is_rejected_with_its_path(published: Path, name: str, content: bytes) -> None:
    (published / "model.safetensors").unlink()
    (published / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        load_checkpoint(published)


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code ran",))


@pytest.mark.parametrize("content", [{"a": Payload()}, Payload()], ids=["inside a table", "bare"])
def test_pickle_that_would_run_code_is_rejected_without_running_it(
    published: Path, content: object, capsys: pytest.CaptureFixture[str]
) -> None:
    (published / "model.safetensors").unlink()
    torch.save(content, published / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"could run code: convert it to model\.safetensors"):
        load_checkpoint(published)
    assert "code ran" not in capsys.readouterr().out


def test_pickle_of_something_else_than_a_table_of_tensors_is_rejected(published: Path) -> None:
    (published / "model.safetensors").unlink()
    torch.save({"epoch": 3, "state_dict": {}}, published / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"is not a dict of tensors: save the model's state_dict\(\)"):
        load_checkpoint(published)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not an index of shards"),
        ('{"weights": {}}', "is not an index of shards"),
        ('{"weight_map": ["a"]}', "is not an index of shards"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "must be a plain file name"),
        ('{"weight_map": {"a": "model-9.safetensors"}}', "model-9.safetensors is missing, although"),
        ('{"weight_map": {"a": "model-1.safetensors"}}', "lists 'a', but model-1.safetensors does not"),
    ],
)
def test_bad_index_of_shards_is_rejected(published: Path, index: str, message: str) -> None:
    shutil.move(published / "model.safetensors", published / "model-1.safetensors")
    (published / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(published)
