"""Jina embeddings v3: XLM-RoBERTa with rotation for positions, and low-rank adapters for tasks.

Sturua et al. 2024, https://arxiv.org/abs/2409.10173. The checkpoint was published with code of its own under
the model type "xlm-roberta", with adapters beside every weight; transformers 5 calls the encoder
"jina_embeddings_v3" and has no adapters. It splits fused projections when it loads a checkpoint, and joins
them again when it saves one.
"""

from collections.abc import Mapping

from attnlens_model.errors import ConfigError
from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.rotary import read_rotary, write_rotary_parameters
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import Family, Layout, Parameters, TaskAdapters, linear_and_norm_names

_MODEL_TYPE = "jina_embeddings_v3"
_DEFAULT_THETA = 20_000.0
# What the publisher's class takes where its file says nothing.
_DEFAULT_HUB_THETA = 10_000.0
_DEFAULT_RANK, _DEFAULT_ALPHA = 4, 1

_CONFIG = ConfigTable(
    keys={
        **{ours: key for ours, key in bert.KEYS.items() if ours != "is_causal"},
        "embeddings.type_vocab_size": ("type_vocab_size", 1),
        "norm.eps": ("layer_norm_eps", 1e-5),
    },
    pad_token_id=1,
    implied={"positions.scheme": "none"},
    required_values={
        "position_embedding_type": ("rotary", None),
        "is_decoder": (False, None),
        "add_cross_attention": (False, None),
    },
)


def _is_jina(content: Mapping[str, object]) -> bool:
    return content["model_type"] == _MODEL_TYPE or content.get("position_embedding_type") == "rotary"


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    fields = _CONFIG.read(content)
    if content["model_type"] == _MODEL_TYPE:
        return fields | {"attention.rotary": read_rotary(content, _DEFAULT_THETA)}
    theta = content.get("rotary_emb_base", _DEFAULT_HUB_THETA)
    return fields | {"attention.rotary": read_rotary(content, theta)}


def _write_config(fields: Mapping[str, object]) -> dict[str, object]:
    return _CONFIG.write(fields) | {"rope_parameters": write_rotary_parameters(fields)}


def _read_adapters(content: Mapping[str, object]) -> TaskAdapters:
    """Return the tasks, and alpha / rank, the factor of every adapter."""
    tasks = content.get("lora_adaptations")
    if not isinstance(tasks, list) or not tasks or not all(isinstance(task, str) for task in tasks):
        raise ConfigError(
            f"lora_adaptations={tasks!r} must be the list of the tasks that the checkpoint has adapters for"
        )
    rank = _positive("lora_rank", content.get("lora_rank", _DEFAULT_RANK))
    return TaskAdapters(
        tuple(tasks), _positive("lora_alpha", content.get("lora_alpha", _DEFAULT_ALPHA)) / rank
    )


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{name}={value!r} must be a number greater than 0")
    return float(value)


_EMBEDDINGS: Mapping[Parameters, str] = {
    "embeddings.token.weight": "embeddings.word_embeddings.weight",
    "embeddings.token_type.weight": "embeddings.token_type_embeddings.weight",
}

_HUB_LAYOUT = Layout(
    weights={
        **_EMBEDDINGS,
        **linear_and_norm_names(
            {
                "embeddings.norm": "emb_ln",
                (
                    "layers.{layer}.attention.query",
                    "layers.{layer}.attention.key",
                    "layers.{layer}.attention.value",
                ): "encoder.layers.{layer}.mixer.Wqkv",
                "layers.{layer}.attention.output": "encoder.layers.{layer}.mixer.out_proj",
                "layers.{layer}.attention_norm": "encoder.layers.{layer}.norm1",
                "layers.{layer}.feed_forward.up": "encoder.layers.{layer}.mlp.fc1",
                "layers.{layer}.feed_forward.down": "encoder.layers.{layer}.mlp.fc2",
                "layers.{layer}.output_norm": "encoder.layers.{layer}.norm2",
            }
        ),
    },
    anchor="encoder.layers.0.mixer.Wqkv.weight",
    roots=("embeddings.", "emb_ln.", "encoder."),
)

FAMILY = Family(
    name="jina_v3",
    model_types=(_MODEL_TYPE, "xlm-roberta"),
    architecture="JinaEmbeddingsV3Model",
    read_config=_read_config,
    write_config=_write_config,
    weights={
        **_EMBEDDINGS,
        **linear_and_norm_names(
            {
                "embeddings.norm": "embeddings.LayerNorm",
                "layers.{layer}.attention.query": "layers.{layer}.self_attn.q_proj",
                "layers.{layer}.attention.key": "layers.{layer}.self_attn.k_proj",
                "layers.{layer}.attention.value": "layers.{layer}.self_attn.v_proj",
                "layers.{layer}.attention.output": "layers.{layer}.self_attn.o_proj",
                "layers.{layer}.attention_norm": "layers.{layer}.post_attention_layernorm",
                "layers.{layer}.feed_forward.up": "layers.{layer}.mlp.fc1",
                "layers.{layer}.feed_forward.down": "layers.{layer}.mlp.fc2",
                "layers.{layer}.output_norm": "layers.{layer}.post_mlp_layernorm",
            }
        ),
    },
    prefixes=("", "roberta.", "model.", "0.auto_model."),
    anchor="layers.0.self_attn.q_proj.weight",
    roots=("embeddings.", "layers."),
    other_layouts=(_HUB_LAYOUT,),
    buffers=bert.BUFFERS,
    claims=_is_jina,
    read_adapters=_read_adapters,
)
