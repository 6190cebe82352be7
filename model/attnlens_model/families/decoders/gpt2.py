"""GPT-2: pre-LN, biases, learned absolute positions, causal.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". The projections are `Conv1D`
modules of transformers, whose weights are stored as (inputs, outputs). Query, key and value are one tensor.
"""

from collections.abc import Mapping

from attnlens_model.families.buffers import holds_causal_mask, holds_masking_score
from attnlens_model.families.config_json.layers import check_custom_code
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import COMMON_PREFIXES, QUERY_KEY_VALUE, Family, linear_and_norm_names

# Default of the configuration class: <|endoftext|>.
_DEFAULT_END_TOKEN = 50_256

_CONFIG = ConfigTable(
    keys={
        "is_causal": ("is_causal", True),
        "embeddings.vocab_size": ("vocab_size", None),
        "hidden_size": ("n_embd", None),
        "num_layers": ("n_layer", None),
        "attention.num_heads": ("n_head", None),
        "feed_forward.intermediate_size": ("n_inner", None),
        "positions.max_position_embeddings": ("n_positions", 1024),
        "norm.eps": ("layer_norm_epsilon", 1e-5),
        "hidden_dropout": ("resid_pdrop", 0.1),
        "attention.dropout": ("attn_pdrop", 0.1),
    },
    activation=("activation_function", "gelu_new"),
    implied={"embeddings.type_vocab_size": 0, "embeddings.norm": False, "norm.placement": "pre"},
    required_values={
        "scale_attn_weights": (True, None),
        "scale_attn_by_inverse_layer_idx": (False, None),
        "add_cross_attention": (False, None),
    },
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    check_custom_code(content, "is_causal")
    return _CONFIG.read(
        {**content, "n_inner": _read_inner_size(content), "pad_token_id": _read_padding(content)}
    )


def _read_inner_size(content: Mapping[str, object]) -> object:
    """Return the intermediate size: `n_inner`, or 4 * `n_embd` if it is missing or null."""
    width, stated = content.get("n_embd"), content.get("n_inner")
    return 4 * width if stated is None and isinstance(width, int) else stated


def _read_padding(content: Mapping[str, object]) -> object:
    """Return `pad_token_id`, which published files do not have, or else the end token.

    The attention mask alone determines what is padding. The id only names a padding token for tokenizers, for
    which 0, an ordinary token of GPT-2, would be wrong. It is 0 if the vocabulary has no end token.
    """
    stated, end = content.get("pad_token_id"), content.get("eos_token_id", _DEFAULT_END_TOKEN)
    if stated is not None:
        return stated
    size = content.get("vocab_size")
    return end if isinstance(end, int) and isinstance(size, int) and 0 <= end < size else 0


def _write_config(fields: Mapping[str, object]) -> dict[str, object]:
    return _CONFIG.write(fields) | {"embd_pdrop": fields["hidden_dropout"]}


FAMILY = Family(
    name="gpt2",
    model_types=("gpt2",),
    architecture="GPT2Model",
    read_config=_read_config,
    write_config=_write_config,
    weights={
        "embeddings.token.weight": "wte.weight",
        "embeddings.position.weight": "wpe.weight",
        **linear_and_norm_names(
            {
                QUERY_KEY_VALUE: "h.{layer}.attn.c_attn",
                "layers.{layer}.attention.output": "h.{layer}.attn.c_proj",
                "layers.{layer}.feed_forward.up": "h.{layer}.mlp.c_fc",
                "layers.{layer}.feed_forward.down": "h.{layer}.mlp.c_proj",
                "layers.{layer}.attention_norm": "h.{layer}.ln_1",
                "layers.{layer}.output_norm": "h.{layer}.ln_2",
                "final_norm": "ln_f",
            }
        ),
    },
    prefixes=("transformer.", *COMMON_PREFIXES),
    anchor="wte.weight",
    roots=("wte.", "wpe.", "h.", "ln_f."),
    buffers={
        "h.{layer}.attn.bias": holds_causal_mask,
        "h.{layer}.attn.masked_bias": holds_masking_score,
    },
    transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
)
