"""Every family compared with `transformers`: hidden states and attention maps.

Where there is none, against a writing of it that shares nothing with the encoder: see `oracles`.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from attnlens_model import Encoder, EncoderConfig, ModuleEncoder, load_checkpoint, read_config
from attnlens_model.families import FAMILIES
from attnlens_model.family import Family
from family_cases import GROUPS
from odd_models import OddModel, float64_throughout, padded_masks, random_inputs

ODD_MODELS = [model for group in GROUPS for model in group.models]
TRACED = [model for group in GROUPS for model in group.traced]
ONE_OF_EACH = [model for group in GROUPS for model in group.one_of_each]
# Those whose files `AutoConfig` reads.
# By name: transformers replaces its own module, which depends on what was imported before.
KNOWN_TO_TRANSFORMERS = [odd for odd in ODD_MODELS if odd.source.__name__ == "transformers"]
HEADS = [head for group in GROUPS for head in group.heads]


def case_id(parameter: object) -> str:
    """Of a set, the same whatever the order of its elements."""
    return " ".join(sorted(parameter)) if isinstance(parameter, set) else str(parameter)


def stored_buffers(model: Any, family: Family) -> dict[str, Tensor]:
    """Buffers that older files contain in addition to weights."""
    positions = torch.arange(64)[None]
    values = {"position_ids": positions, "token_type_ids": torch.zeros_like(positions)}
    if hasattr(getattr(model, "rotary_emb", None), "inv_freq"):
        values["inv_freq"] = model.rotary_emb.inv_freq
    # GPT-2's causal mask, and the score of masked keys.
    values |= {"bias": torch.ones(1, 1, 64, 64).tril().bool(), "masked_bias": torch.tensor(-1e4)}
    endings = {name: name.rpartition(".")[2] for name in family.named_buffers(1)}
    return {name: values[ending] for name, ending in endings.items() if ending in values}


def run(encoder: Encoder | ModuleEncoder, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        output = encoder(**inputs, output_attentions=True)
    return (output.last_hidden_state, *output.attentions)


def largest_differences(
    encoder: Encoder | ModuleEncoder, model: nn.Module, inputs: dict[str, Tensor]
) -> tuple[float, float]:
    """Of the hidden states and of the attention maps, over live tokens."""
    is_float64 = next(model.parameters()).dtype == torch.float64
    with torch.no_grad(), float64_throughout(model) if is_float64 else nullcontext():
        theirs = model(**inputs, output_attentions=True)
    hidden, *maps = run(encoder, inputs)
    live = inputs["attention_mask"].bool()
    assert len(maps) == len(theirs.attentions) == encoder.config.num_layers
    pairs = zip(maps, theirs.attentions, strict=True)
    return (
        float((hidden - theirs.last_hidden_state)[live].abs().max()),
        max(float((a - b).transpose(1, 2)[live].abs().max()) for a, b in pairs),
    )


@pytest.mark.parametrize("odd", [*ODD_MODELS, *TRACED], ids=str)
def test_random_model_matches_transformers(odd: OddModel, tmp_path: Path) -> None:
    model = odd.make()
    model.save_pretrained(tmp_path)
    encoder = load_checkpoint(tmp_path).encoder
    batches = [random_inputs(model.config, mask) for mask in padded_masks(4, odd.num_tokens)]
    worst = [
        max(each) for each in zip(*(largest_differences(encoder, model, b) for b in batches), strict=True)
    ]
    print(f"{odd}: hidden {worst[0]:.2e}, attention {worst[1]:.2e}")  # noqa: T201 - shown by `pytest -rP`
    assert max(worst) < 1e-5
    if isinstance(encoder, ModuleEncoder):
        return  # it is the same module
    # Where rounding no longer hides anything.
    encoder.double()
    model.double()
    assert max(max(largest_differences(encoder, model, inputs)) for inputs in batches) < 1e-12


@pytest.mark.parametrize("odd", [*ODD_MODELS, *TRACED], ids=str)
def test_result_is_independent_of_the_padding_side(odd: OddModel, tmp_path: Path) -> None:
    model = odd.make()
    model.save_pretrained(tmp_path)
    encoder = load_checkpoint(tmp_path).encoder
    length = max(1, odd.num_tokens // 2)
    inputs = random_inputs(model.config, torch.ones(1, length, dtype=torch.int64))
    alone = run(encoder, inputs)
    # Absolute positions move with the padding, in the published models too; all others do not.
    sides = [False, True] if encoder.config.positions.scheme != "absolute" else [False]
    for is_left in sides:
        room = (odd.num_tokens - length, 0) if is_left else (0, odd.num_tokens - length)
        padded = run(encoder, {name: nn.functional.pad(each, room) for name, each in inputs.items()})
        place = slice(room[0], room[0] + length)
        assert (padded[0][:, place] - alone[0]).abs().max() < 1e-5
        for wide, narrow in zip(padded[1:], alone[1:], strict=True):
            assert (wide[:, :, place, place] - narrow).abs().max() < 1e-5


@pytest.mark.parametrize(("odd", "head", "unused"), HEADS, ids=case_id)
def test_task_model_loads_and_its_head_is_reported(
    odd: OddModel, head: str, unused: set[str], tmp_path: Path
) -> None:
    model = odd.make(head)
    model.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert unused <= set(checkpoint.unused_tensors)
    left_out = [name for name in checkpoint.unused_tensors if "decoder" not in name]
    assert not any("encoder" in name or "transformer" in name or "layers" in name for name in left_out)
    inputs = random_inputs(model.config, torch.ones(2, 9, dtype=torch.int64))
    body = model.get_encoder() if "T5" in odd.name else model.base_model
    assert max(largest_differences(checkpoint.encoder, body, inputs)) < 1e-5


@pytest.mark.parametrize("odd", ONE_OF_EACH, ids=str)
def test_table_of_a_family_names_every_parameter_once_and_every_prefix_is_found(
    odd: OddModel, tmp_path: Path
) -> None:
    model = odd.make()
    model.save_pretrained(tmp_path)
    config = read_config(tmp_path / "config.json")
    family = FAMILIES[config.family]
    expected = load_checkpoint(tmp_path).encoder.state_dict()
    for layout in family.layouts:
        tables, theirs = zip(*layout.weight_names(config.num_distinct_layers, expected), strict=True)
        ours = [name for table in tables for name in table]
        assert len(set(ours)) == len(ours)
        assert len(set(theirs)) == len(theirs)
    assert any(
        set(expected)
        <= {name for names, _ in layout.weight_names(config.num_distinct_layers, expected) for name in names}
        for layout in family.layouts
    )
    (tmp_path / "model.safetensors").unlink()
    for prefix in family.prefixes:
        tensors = {prefix + name: tensor for name, tensor in model.state_dict().items()}
        # As older versions saved them.
        tensors |= {prefix + name: tensor for name, tensor in stored_buffers(model, family).items()}
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        found = load_checkpoint(tmp_path).encoder.state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("odd", KNOWN_TO_TRANSFORMERS, ids=str)
def test_missing_config_keys_default_to_those_of_transformers(odd: OddModel, tmp_path: Path) -> None:
    """`save_pretrained` writes everything; older versions only wrote values that differ from the default."""
    full = json.loads(odd.config().to_json_string(use_diff=False))
    required = [key for key in full if key == "model_type" or key in SIZE_KEYS]
    # Large enough for every family's default padding id.
    sparse = {key: full[key] for key in required} | {"vocab_size": 200_000}
    (tmp_path / "config.json").write_text(json.dumps(sparse))
    theirs: Any = AutoConfig.from_pretrained(tmp_path)
    assert read_config(tmp_path / "config.json") == EncoderConfig.from_dict(theirs.to_dict())


SIZE_KEYS = {
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "dim", "n_layers", "n_heads", "hidden_dim"),
    *("d_model", "num_layers", "num_heads", "d_ff", "n_positions"),
    *("n_embd", "n_layer", "n_head"),
}


@pytest.mark.parametrize("odd", ODD_MODELS, ids=str)
def test_configuration_survives_both_kinds_of_file(odd: OddModel) -> None:
    config = EncoderConfig.from_dict(odd.config().to_dict())
    assert EncoderConfig.from_json(config.to_json()) == config
    assert EncoderConfig.from_dict(config.to_hugging_face()) == config


@pytest.mark.parametrize("odd", ONE_OF_EACH, ids=str)
def test_half_precision_stays_finite_for_any_mask(odd: OddModel, tmp_path: Path) -> None:
    model = odd.make()
    model.save_pretrained(tmp_path)
    encoder = load_checkpoint(tmp_path).encoder.half()
    for mask in padded_masks(3, odd.num_tokens):
        mask[1] = 0
        outputs = run(encoder, random_inputs(model.config, mask))
        assert all(each.isfinite().all() and each.dtype == torch.float16 for each in outputs)
        assert all((weights[1] == 0).all() for weights in outputs[1:])
