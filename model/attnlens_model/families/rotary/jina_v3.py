"""Jina embeddings v3: XLM-RoBERTa with RoPE and low-rank adapters for tasks.

Sturua et al. 2024, https://arxiv.org/abs/2409.10173. The checkpoint was published with custom code and the
model type "xlm-roberta"; every weight has adapters. transformers 5 uses the model type "jina_embeddings_v3"
and has no adapters. It splits fused projections when it loads a checkpoint and fuses them when it saves one.
"""

from collections.abc import Mapping

from attnlens_model.errors import ConfigError
from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.rotary import (
    positive_number,
    read_rotary,
    write_rotary_parameters,
)
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.rotary import gte
from attnlens_model.family import (
    COMMON_PREFIXES,
    QUERY_KEY_VALUE,
    Family,
    Layout,
    TaskAdapters,
    linear_and_norm_names,
)

_MODEL_TYPE = "jina_embeddings_v3"
_DEFAULT_THETA = 20_000.0
# Default of the custom code.
_DEFAULT_HUB_THETA = 10_000.0
_DEFAULT_RANK, _DEFAULT_ALPHA = 4, 1

_CONFIG = ConfigTable(
    keys={
        **bert.ENCODER_KEYS,
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
    """Return the tasks and the scale of the adapters, alpha / rank."""
    tasks = content.get("lora_adaptations")
    if not isinstance(tasks, list) or not tasks or not all(isinstance(task, str) for task in tasks):
        raise ConfigError(
            f"lora_adaptations={tasks!r} must be the list of tasks for which the checkpoint has adapters"
        )
    rank = positive_number("lora_rank", content.get("lora_rank", _DEFAULT_RANK))
    alpha = positive_number("lora_alpha", content.get("lora_alpha", _DEFAULT_ALPHA))
    return TaskAdapters(tuple(tasks), alpha / rank)


_HUB_LAYOUT = Layout(
    weights={
        **bert.TOKEN_WEIGHTS,
        **linear_and_norm_names(
            {
                "embeddings.norm": "emb_ln",
                QUERY_KEY_VALUE: "encoder.layers.{layer}.mixer.Wqkv",
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
        **bert.TOKEN_WEIGHTS,
        **bert.EMBEDDINGS_NORM,
        **linear_and_norm_names(
            {
                **gte.POST_NORM_LAYERS,
                "layers.{layer}.feed_forward.up": "layers.{layer}.mlp.fc1",
                "layers.{layer}.feed_forward.down": "layers.{layer}.mlp.fc2",
            }
        ),
    },
    prefixes=("roberta.", *COMMON_PREFIXES),
    anchor="layers.0.self_attn.q_proj.weight",
    roots=("embeddings.", "layers."),
    other_layouts=(_HUB_LAYOUT,),
    buffers=bert.FAMILY.buffers,
    claims=_is_jina,
    read_adapters=_read_adapters,
)
