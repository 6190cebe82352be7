"""Invariants of all encoders."""

import math

import pytest
import torch
from torch import Tensor, nn

from attnlens_model import Encoder, EncoderConfig, EncoderOutput, new_encoder
from attnlens_model.embeddings import padding_offset_positions
from configs import changed, small_config

SMALL = small_config(
    {
        "embeddings.vocab_size": 101,
        "hidden_size": 24,
        "num_layers": 3,
        "attention.num_heads": 4,
        "feed_forward.intermediate_size": 40,
        "positions.max_position_embeddings": 32,
    }
)
CAUSAL = changed(SMALL, {"is_causal": True})


def lively(config: EncoderConfig) -> Encoder:
    """A fresh encoder with every parameter moved away from its start, so that no default hides anything."""
    encoder = new_encoder(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return encoder


def random_ids(*shape: int) -> Tensor:
    return torch.randint(0, SMALL.embeddings.vocab_size, shape)


def run(
    encoder: Encoder, ids: Tensor, mask: Tensor | None = None, types: Tensor | None = None
) -> EncoderOutput:
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        output: EncoderOutput = encoder(ids, mask, types, output_attentions=True)
    return output


def tensors(output: EncoderOutput) -> tuple[Tensor, ...]:
    return (output.last_hidden_state, *output.attentions)


def largest_difference(one: EncoderOutput, other: EncoderOutput) -> float:
    pairs = zip(tensors(one), tensors(other), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("tokens", [1, 5, 512])
@pytest.mark.parametrize("batch", [1, 10])
def test_shapes(batch: int, tokens: int) -> None:
    encoder = new_encoder(changed(SMALL, {"positions.max_position_embeddings": 512, "num_layers": 2}), seed=0)
    output = run(encoder, random_ids(batch, tokens))
    assert output.last_hidden_state.shape == (batch, tokens, 24)
    assert [weights.shape for weights in output.attentions] == [(batch, 4, tokens, tokens)] * 2


def test_attentions_are_empty_unless_requested_and_the_hidden_states_are_the_same() -> None:
    encoder, ids = lively(SMALL), random_ids(2, 7)
    with_attentions = run(encoder, ids)
    without = encoder(ids, torch.ones_like(ids))
    assert without.layers == ()
    assert torch.equal(without.last_hidden_state, with_attentions.last_hidden_state)


@pytest.mark.parametrize("config", [SMALL, CAUSAL], ids=["full", "causal"])
def test_result_is_independent_of_a_padded_batch(config: EncoderConfig) -> None:
    encoder, ids = lively(config), random_ids(3, 20)
    mask = (torch.arange(20)[None] < torch.tensor([[20], [7], [1]])).long()
    together = run(encoder, ids, mask)
    for row, length in enumerate([20, 7, 1]):
        alone = run(encoder, ids[row : row + 1, :length])
        assert (together.last_hidden_state[row, :length] - alone.last_hidden_state[0]).abs().max() < 1e-5
        for in_batch, by_itself in zip(together.attentions, alone.attentions, strict=True):
            assert (in_batch[row, :, :length, :length] - by_itself[0]).abs().max() < 1e-5
            assert (in_batch[row, :, :, length:] == 0).all()


def test_rows_and_padding_do_not_affect_other_rows() -> None:
    encoder, ids = lively(SMALL), random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    before = run(encoder, ids, mask)
    ids[0, 6:] = random_ids(3)
    ids[1] = random_ids(9)
    after = run(encoder, ids, mask)
    assert torch.equal(before.last_hidden_state[0, :6], after.last_hidden_state[0, :6])
    assert all(
        torch.equal(a[0, :, :6], b[0, :, :6])
        for a, b in zip(before.attentions, after.attentions, strict=True)
    )
    assert not torch.equal(before.last_hidden_state[1], after.last_hidden_state[1])


def test_causal_encoder_does_not_look_ahead_and_another_does() -> None:
    ids = random_ids(2, 12)
    changed = ids.clone()
    changed[:, 8] = (ids[:, 8] + 1) % SMALL.embeddings.vocab_size
    for config, leaks in ((CAUSAL, False), (SMALL, True)):
        encoder = lively(config)
        before, after = run(encoder, ids), run(encoder, changed)
        assert torch.equal(before.last_hidden_state[:, :8], after.last_hidden_state[:, :8]) is not leaks
        assert not torch.equal(before.last_hidden_state[:, 8:], after.last_hidden_state[:, 8:])
        above_diagonal = torch.ones(12, 12, dtype=torch.bool).triu(1)
        assert all((weights[..., above_diagonal] == 0).all() for weights in before.attentions) is not leaks


def test_causal_encoder_in_half_precision_does_not_look_ahead() -> None:
    # bfloat16 counts exactly to 256 only.
    config = changed(CAUSAL, {"positions.max_position_embeddings": 600, "num_layers": 1})
    output = run(lively(config).bfloat16(), random_ids(1, 600))
    assert output.last_hidden_state.dtype == torch.bfloat16
    keep = torch.ones(600, 600, dtype=torch.bool).tril()
    assert (output.attentions[0][..., ~keep] == 0).all()
    assert (output.attentions[0].diagonal(dim1=-2, dim2=-1) > 0).any(dim=1).all()


@pytest.mark.parametrize("config", [SMALL, CAUSAL], ids=["full", "causal"])
def test_nothing_is_ever_nan_and_a_text_of_padding_only_attends_to_nothing(config: EncoderConfig) -> None:
    encoder, ids = lively(config).train(), random_ids(4, 6)
    mask = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1], [1, 0, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    output = encoder(ids, mask, output_attentions=True)
    assert output.last_hidden_state.isfinite().all()
    assert all((weights[0] == 0).all() and weights.isfinite().all() for weights in output.attentions)
    (output.last_hidden_state.square().sum() + sum(w.square().sum() for w in output.attentions)).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in encoder.parameters())


def test_token_types_are_zero_when_omitted_and_matter_when_given() -> None:
    encoder, ids = lively(SMALL), random_ids(2, 6)
    left_out = run(encoder, ids)
    assert largest_difference(left_out, run(encoder, ids, types=torch.zeros_like(ids))) == 0
    assert largest_difference(left_out, run(encoder, ids, types=torch.ones_like(ids))) > 1e-2


def test_encoder_without_token_types_has_no_table_and_rejects_them() -> None:
    encoder, ids = lively(changed(SMALL, {"embeddings.type_vocab_size": 0})), random_ids(2, 6)
    assert not any("token_type" in name for name in encoder.state_dict())
    assert run(encoder, ids).last_hidden_state.shape == (2, 6, 24)
    with pytest.raises(ValueError, match="type_vocab_size=0: leave them out"):
        encoder(ids, torch.ones_like(ids), torch.zeros_like(ids))


def test_positions_with_an_offset_count_live_tokens_wherever_the_padding_is() -> None:
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0]])
    expected = [[4, 5, 6, 3, 3], [3, 3, 4, 5, 6], [3, 4, 3, 3, 5], [3, 3, 3, 3, 3]]
    assert padding_offset_positions(mask, pad_token_id=3).tolist() == expected


def test_only_token_type_need_not_be_given() -> None:
    encoder, ids = lively(changed(SMALL, {"embeddings.type_vocab_size": 1})), random_ids(2, 6)
    assert largest_difference(run(encoder, ids), run(encoder, ids, types=torch.zeros_like(ids))) == 0
    before = run(encoder, ids)
    with torch.no_grad():
        encoder.get_parameter("embeddings.token_type.weight").add_(torch.randn(24))
    assert largest_difference(before, run(encoder, ids)) > 1e-2


def test_layers_that_share_weights_are_applied_in_groups() -> None:
    shared = lively(changed(SMALL, {"num_layers": 4, "num_hidden_groups": 2}))
    unrolled = Encoder(changed(SMALL, {"num_layers": 4})).eval()
    weights = shared.state_dict()
    for layer in (3, 2, 1, 0):
        own = {name: each for name, each in weights.items() if name.startswith(f"layers.{layer // 2}.")}
        weights |= {name.replace(f".{layer // 2}.", f".{layer}.", 1): each for name, each in own.items()}
    unrolled.load_state_dict(weights)
    ids = random_ids(2, 6)
    assert largest_difference(run(shared, ids), run(unrolled, ids)) == 0


def test_inputs_that_do_not_fit_are_rejected_with_both_numbers() -> None:
    encoder = new_encoder(SMALL, seed=0)
    ids = random_ids(2, 33)
    with pytest.raises(ValueError, match="33 tokens are more than max_tokens=32"):
        encoder(ids, torch.ones_like(ids))
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 8\) but input_ids \(2, 9\)"):
        encoder(ids[:, :9], torch.ones_like(ids[:, :8]))
    with pytest.raises(ValueError, match=r"input_ids has shape \(33,\)"):
        encoder(ids[0], torch.ones_like(ids[0]))


@pytest.mark.parametrize("config", [SMALL, CAUSAL], ids=["full", "causal"])
def test_float64_agrees_more_precisely(config: EncoderConfig) -> None:
    encoder, ids = lively(config), random_ids(2, 11)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    single = run(encoder, ids, mask)
    double = run(encoder.double(), ids, mask)
    assert {t.dtype for t in tensors(double)} == {torch.float64}
    assert 0 < largest_difference(single, double) < 1e-5


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone() -> None:
    state = torch.random.get_rng_state()
    one, same, other = (new_encoder(SMALL, seed) for seed in (7, 7, 8))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.embeddings.token.weight, other.embeddings.token.weight)
    assert not one.training


def test_fresh_matrices_are_xavier_uniform_one_by_one() -> None:
    config = changed(
        SMALL, {"hidden_size": 128, "feed_forward.intermediate_size": 320, "embeddings.type_vocab_size": 32}
    )
    for name, module in new_encoder(config, seed=0).named_modules():
        if isinstance(module, nn.Linear):
            expected_std = math.sqrt(2 / (module.in_features + module.out_features))
            assert module.weight.std().item() == pytest.approx(expected_std, rel=0.03), name
            assert not module.bias.any(), name
        elif isinstance(module, nn.Embedding):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.05), name


def test_dropout_is_part_of_training_only() -> None:
    encoder, ids = lively(SMALL), random_ids(2, 7)
    assert largest_difference(run(encoder, ids), run(encoder, ids)) == 0
    encoder.train()
    assert largest_difference(run(encoder, ids), run(encoder, ids)) > 1e-2


@pytest.mark.parametrize("config", [SMALL, CAUSAL], ids=["full", "causal"])
def test_exports_with_dynamic_axes_and_without_booleans_or_branches(
    config: EncoderConfig,
) -> None:
    encoder = lively(config)
    ids = random_ids(2, 9)
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(
        encoder,
        (ids, torch.ones_like(ids), torch.zeros_like(ids)),
        {"output_attentions": True},
        dynamic_shapes=(free, free, free, None),
    )
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "call_function"]
    assert torch.bool not in {value.dtype for value in values if isinstance(value, Tensor)}
    graph = program.module()
    for batch, tokens in ((1, 1), (3, 1), (1, 32), (3, 20)):
        ids = random_ids(batch, tokens)
        mask = torch.ones_like(ids)
        mask[-1, : tokens // 2] = 0
        with torch.no_grad():
            exported = EncoderOutput(*graph(ids, mask, torch.zeros_like(ids), output_attentions=True))
        assert largest_difference(exported, run(encoder, ids, mask)) < 1e-6
