"""Disentangled attention: buckets and scores against hand-computed values and the published code."""

import math
from pathlib import Path

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from attnlens_model import (
    ATTENTION_WEIGHTS,
    ConfigError,
    DisentangledAttentionConfig,
    EncoderConfig,
    load_checkpoint,
)
from attnlens_model.attention.disentangled import (
    DisentangledSelfAttention,
    DistanceEmbeddings,
    bucketed_distances,
)
from configs import changed, small_config
from odd_models import OddModel

CONFIG = small_config(
    {
        "embeddings.vocab_size": 20,
        "hidden_size": 12,
        "num_layers": 1,
        "attention.kind": "disentangled",
        "attention.num_heads": 3,
        "feed_forward.intermediate_size": 8,
        "positions.max_position_embeddings": 30,
        "attention.terms": "c2p|p2c",
        "attention.distance_buckets": 8,
        "attention.max_relative_positions": 16,
    }
)
PUBLISHED: dict[str, object] = {
    "model_type": "deberta-v2",
    "vocab_size": 128100,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
}


def test_buckets_match_hand_computed_values() -> None:
    # 4 + ceil(log(distance / 4) / log(15 / 4) * 3): 4 * 3.75 ** (1 / 3) = 6.2, 4 * 3.75 ** (2 / 3) = 9.7
    last_of_bucket = [*range(5), 6, 9, 15]
    buckets = bucketed_distances(29, 8, 16)
    assert [buckets[last] for last in last_of_bucket] == list(range(8))
    assert [buckets[last + 1] for last in last_of_bucket[:-1]] == list(range(1, 8))
    assert buckets[16] == 8
    assert len(buckets) == 30


@pytest.mark.parametrize(
    ("num_buckets", "farthest", "longest"),
    [(256, 512, 512), (256, 512, 2048), (8, 16, 64), (9, 64, 64), (8, 33, 64), (2, 5, 9), (64, 512, 512)],
)
def test_buckets_match_transformers(num_buckets: int, farthest: int, longest: int) -> None:
    distances = torch.arange(longest)
    expected = make_log_bucket_position(distances, num_buckets, farthest).long()
    assert bucketed_distances(longest - 1, num_buckets, farthest) == expected.tolist()


def test_buckets_are_exact_where_the_logarithm_is_an_integer() -> None:
    # 12 / 9 is the square root of 16 / 9, so the logarithm is exactly 4 of 8 steps. fp32 rounds it up.
    assert bucketed_distances(12, 18, 17)[12] == 9 + 4
    fp32 = make_log_bucket_position(torch.tensor([12]), 18, 17)
    assert fp32.item() == 9 + 5


def modules(config: EncoderConfig) -> tuple[DisentangledSelfAttention, DistanceEmbeddings]:
    attention = config.attention
    assert isinstance(attention, DisentangledAttentionConfig)
    embeddings = DistanceEmbeddings(attention, config.sizes).double()
    return DisentangledSelfAttention(attention, config.sizes).double().eval(), embeddings


@pytest.mark.parametrize(("terms", "is_shared"), [("c2p", False), ("p2c", True), ("c2p|p2c", False)])
def test_score_is_the_sum_of_its_terms(terms: str, is_shared: bool) -> None:
    config = changed(CONFIG, {"attention.terms": terms, "attention.share_att_key": is_shared})
    attention, embeddings = modules(config)
    states = torch.randn(1, 30, 12, dtype=torch.float64)
    distances = embeddings(30)
    weights = attention(states, None, distances)[1][ATTENTION_WEIGHTS]
    query, key, _ = attention.project(states)
    buckets = bucketed_distances(29, 8, 16)

    def projected(module: torch.nn.Module, row: int, head: int) -> torch.Tensor:
        vector: torch.Tensor = module(embeddings.table.weight[row])
        return vector[head * 4 : head * 4 + 4]

    for head, i in ((0, 0), (1, 12), (2, 29)):
        scores = []
        for j in range(30):
            row = min(max(8 + buckets[abs(i - j)] * (1 if i > j else -1), 0), 15)
            score = query[0, head, i] @ key[0, head, j]
            if "c2p" in terms:
                score = score + query[0, head, i] @ projected(
                    attention.distance_key or attention.key, row, head
                )
            if "p2c" in terms:
                score = score + key[0, head, j] @ projected(
                    attention.distance_query or attention.query, row, head
                )
            scores.append(score / math.sqrt(4 * (1 + len(terms.split("|")))))
        assert torch.allclose(torch.stack(scores).softmax(0), weights[0, head, i], rtol=0, atol=1e-14)


def test_rows_have_values_on_the_meta_device() -> None:
    with torch.device("meta"):
        _, embeddings = modules(changed(CONFIG, {"positions.max_position_embeddings": 17}))
    # Keys far before the query have the last row, keys far after it the first.
    assert embeddings.rows[:8].tolist() == [0, 1, 1, 1, 1, 1, 1, 2]
    assert embeddings.rows[-8:].tolist() == [14, 15, 15, 15, 15, 15, 15, 15]
    assert list(embeddings.state_dict()) == ["table.weight"]


def test_published_configuration_is_read() -> None:
    config = EncoderConfig.from_dict(PUBLISHED | {"max_relative_positions": -1, "attention_head_size": 64})
    attention = config.attention
    assert isinstance(attention, DisentangledAttentionConfig)
    assert attention.terms == "c2p|p2c"
    assert attention.distance_buckets == 256
    assert attention.farthest_distance(config.max_tokens) == config.max_tokens == 512
    assert attention.share_att_key
    assert attention.distance_norm
    assert config.positions.scheme == "none"
    assert config.embeddings.type_vocab_size == config.embeddings.pad_token_id == 0
    assert config.norm.eps == 1e-7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pos_att_type": "p2p|c2p"}, "pos_att_type='p2p|c2p' is not supported"),
        ({"pos_att_type": 3}, "pos_att_type=3 is not supported"),
        ({"pos_att_type": ["c2p", "c2p"]}, "is not supported: only c2p, p2c or both are"),
        ({"pos_att_type": []}, "with relative_attention=True is not supported"),
        ({"relative_attention": False}, "with relative_attention=False is not supported"),
        ({"norm_rel_ebd": "layer_norm|x"}, "norm_rel_ebd='layer_norm|x' is not supported"),
        (
            {"relative_attention": False, "pos_att_type": None},
            "norm_rel_ebd='layer_norm' is not supported without relative_attention",
        ),
        ({"attention_head_size": 32}, "attention_head_size=32 is not supported"),
        ({"position_buckets": 1}, "distance_buckets=1: must be 0 (no buckets), or at least 2"),
        (
            {"position_buckets": 256, "max_relative_positions": 129},
            "and less than 2 * (max_relative_positions=129 - 1)",
        ),
        ({"conv_kernel_size": 4}, "convolution.kernel_size=4: must be odd"),
        ({"conv_kernel_size": 3, "conv_groups": 5}, "convolution.groups=5: must divide hidden_size=768"),
        ({"conv_kernel_size": 3, "conv_act": "elu"}, "convolution.activation='elu' is not supported"),
    ],
)
def test_unsupported_published_values_are_rejected_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EncoderConfig.from_dict(PUBLISHED | change)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention.rotary.theta": 10_000.0}, "unknown key 'attention.rotary'"),
        ({"attention.bias": False}, "unknown key 'attention.bias'"),
        ({"attention.kind": "softmax"}, "unknown key 'attention.terms'"),
        ({"attention.terms": "p2p"}, "attention.terms='p2p' is not supported: choose one of c2p, p2c, c2p|"),
    ],
)
def test_keys_of_other_attention_kinds_are_rejected(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(CONFIG, change)
    assert message in str(caught.value)


def test_unused_position_embeddings_are_reported(tmp_path: Path) -> None:
    keys = ("relative_attention", "pos_att_type", "position_biased_input")
    model = OddModel("DebertaV2", {key: PUBLISHED[key] for key in keys} | {"num_hidden_layers": 1}).make()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tensors = {f"deberta.{name}": tensor for name, tensor in model.state_dict().items()}
    unused = "deberta.embeddings.position_embeddings.weight"
    torch.save(tensors | {unused: torch.zeros(64, 96)}, tmp_path / "pytorch_model.bin")
    assert load_checkpoint(tmp_path).unused_tensors == (unused,)
