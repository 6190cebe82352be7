"""Published models that this version does not read: what each is, so that a refusal says it.

The keys of the tables are `model_type` values of a Hugging Face `config.json`.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlens_model.errors import CheckpointError, suggestion

_DECODER = (
    "a decoder, a language model that reads from left to right, of which this version reads Llama, Mistral, "
    "Qwen2, Qwen3 and Gemma 3 of text alone"
)
_ENCODER_DECODER = (
    "an encoder and a decoder together, of which this version reads those of T5, mT5 and umT5 alone"
)
_SPEECH = "a model of speech or sound, not of text"
_VISION = "a model of images, not of text"
_IMAGE_AND_TEXT = "a model of images and text; its text half is not supported yet"
_STATIC = "a table of one vector for each token, without layers: use model2vec or sentence-transformers"

_NO_TEXT = (_SPEECH, _VISION, _IMAGE_AND_TEXT, _STATIC)
# How alike the names of related models are, as difflib counts: "newest" and "neobert" are 0.6 alike, "qwen4"
# and "qwen3" 0.8.
_RESEMBLES = 0.7
_UNTELLING = ("attnlens", "new")

_KINDS: Mapping[str, Sequence[str]] = {
    _DECODER: (
        *("bloom", "codegen", "cohere", "cohere2", "ctrl", "deepseek_v2", "deepseek_v3", "falcon", "gemma"),
        *("gemma2", "gemma3", "glm", "glm4", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo"),
        *("gpt_neox", "gpt_oss", "gptj", "granite", "helium", "lfm2", "llama4", "llama4_text"),
        *("mamba", "mamba2", "ministral", "mixtral", "modernbert-decoder", "mpt", "nemotron"),
        *("olmo", "olmo2", "olmo3", "openai-gpt", "opt", "persimmon", "phi", "phi3", "qwen2_moe"),
        *("qwen3_moe", "qwen3_next", "rwkv", "smollm3", "stablelm", "starcoder2", "xglm"),
    ),
    _ENCODER_DECODER: (
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led"),
        *("longt5", "m2m_100", "marian", "mbart", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart"),
        *("prophetnet", "switch_transformers", "t5gemma", "t5gemma2"),
    ),
    _SPEECH: (
        *("audio-spectrogram-transformer", "clap", "data2vec-audio", "encodec", "hubert", "moonshine"),
        *("musicgen", "parakeet_ctc", "seamless_m4t", "sew", "sew-d", "speech_to_text", "speecht5"),
        *("unispeech", "wav2vec2", "wav2vec2-bert", "wav2vec2-conformer", "wavlm", "whisper"),
    ),
    _VISION: (
        *("beit", "convnext", "convnextv2", "data2vec-vision", "deit", "detr", "dinov2", "dinov3_vit"),
        *("dpt", "mobilenet_v2", "mobilevit", "resnet", "sam", "sam2", "segformer", "swin", "swinv2"),
        *("videomae", "vit", "vit_mae", "yolos"),
    ),
    _IMAGE_AND_TEXT: (
        *("align", "altclip", "blip", "blip-2", "chinese_clip", "clip", "clip_text_model", "clipseg"),
        *("colpali", "colqwen2", "flava", "idefics3", "layoutlmv2", "layoutlmv3", "llava"),
        *("lxmert", "modernvbert", "owlvit", "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "siglip"),
        *("siglip2", "vilt", "visual_bert", "xclip"),
    ),
    _STATIC: ("model2vec",),
}

# Encoders of text that this version cannot compute, and what they have that it lacks.
_NOT_YET = {
    "canine": "characters in place of tokens",
    "convbert": "convolutions beside the heads",
    "ernie_m": "",
    "esm": "made for proteins",
    "flaubert": "",
    "fnet": "Fourier transforms in place of attention",
    "funnel": "layers that shorten the sequence",
    "ibert": "arithmetic in integers",
    "layoutlm": "places on a page beside tokens",
    "lilt": "",
    "luke": "entities beside tokens",
    "markuplm": "",
    "mobilebert": "bottlenecks around each layer, and norms that don't normalise",
    "mra": "approximated attention",
    "nezha": "relative positions in each layer",
    "nystromformer": "approximated attention",
    "reformer": "attention within hash buckets",
    "roc_bert": "",
    "squeezebert": "convolutions in place of projections",
    "tapas": "rows and columns of tables",
    "xlm": "languages beside tokens",
    "xlnet": "permuted language modelling",
    "xmod": "adapters for each language",
    "yoso": "approximated attention",
}
# What the name of a class tells where the table has no entry.
_SUFFIXES = {
    "ForCausalLM": _DECODER,
    "ForConditionalGeneration": _ENCODER_DECODER,
    "ForImageClassification": _VISION,
    "ForCTC": _SPEECH,
}


# Keys of a `config.json` by which an architecture is known, the most specific ones first.
_SIGNS: Mapping[str, tuple[str, ...]] = {
    "gemma3_text": ("query_pre_attn_scalar", "rms_norm_eps"),
    "qwen2": ("use_sliding_window", "rms_norm_eps"),
    "llama": ("num_key_value_heads", "rms_norm_eps"),
    "t5": ("relative_attention_num_buckets", "d_kv"),
    "deberta-v2": ("relative_attention", "pos_att_type"),
    "longformer": ("attention_window", "hidden_size"),
    "big_bird": ("num_random_blocks", "block_size"),
    "modernbert": ("local_attention", "hidden_size"),
    "nomic_bert": ("rotary_emb_base", "n_embd"),
    "gte": ("rope_theta", "layer_norm_eps"),
    "distilbert": ("n_heads", "hidden_dim"),
    "bert": ("type_vocab_size", "layer_norm_eps"),
}


def refusal(content: Mapping[str, object], supported: Sequence[str]) -> str:
    """Return why a `model_type` that this version does not read is refused.

    Args:
        content: of the `config.json`.
        supported: the values that are read.
    """
    model_type, architectures = str(content["model_type"]), content.get("architectures")
    names = ", ".join(supported)
    what = next((kind for kind, members in _KINDS.items() if model_type in members), None)
    if what is None and model_type in _NOT_YET:
        why = f" ({_NOT_YET[model_type]})" if _NOT_YET[model_type] else ""
        what = f"an encoder that is not supported yet{why}"
    close = suggestion(model_type, supported) if what is None else ""
    if what is None and not close:
        classes = [str(name) for name in architectures] if isinstance(architectures, list) else []
        endings = (
            kind for suffix, kind in _SUFFIXES.items() if any(name.endswith(suffix) for name in classes)
        )
        what = next(endings, None)
    hint = "" if close or what in _NO_TEXT else _nearest_architecture(model_type, content, supported)
    if what is None:
        return f"model_type={model_type!r} is not known{close}{hint}: attnlens reads the encoders {names}"
    return f"model_type={model_type!r} is {what}{hint}. attnlens reads the encoders {names}"


def _nearest_architecture(model_type: str, content: Mapping[str, object], supported: Sequence[str]) -> str:
    """Return a clause with the supported architecture that `content` resembles most; empty if there is none.

    The keys say how a model is built; its name is the next best guess.
    """
    for name, keys in _SIGNS.items():
        if all(key in content for key in keys):
            return f"; the nearest supported architecture is {name}, by the keys {' and '.join(keys)}"
    telling = [name for name in supported if name not in _UNTELLING]
    alike = difflib.get_close_matches(model_type, telling, n=1, cutoff=_RESEMBLES)
    return f"; the nearest supported architecture is {alike[0]}, by its name" if alike else ""


def check_directory(directory: Path) -> None:
    """Refuse a directory that holds something other than a whole encoder, and say what it is.

    Raises:
        CheckpointError: it does.
    """
    adapter = directory / "adapter_config.json"
    if adapter.is_file():
        base = read_object(adapter).get("base_model_name_or_path") or "its base model"
        raise CheckpointError(
            f"{directory} holds an adapter (PEFT) for {base}, not a whole model: merge the two with peft's "
            "merge_and_unload(), save the result with save_pretrained(), and export that directory"
        )
    if (directory / "config.json").is_file():
        return
    listed = read_json(directory / "modules.json")
    modules = [module for module in listed if isinstance(module, dict)] if isinstance(listed, list) else []
    for module in modules:
        kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if kind == "StaticEmbedding":
            raise CheckpointError(f"{directory} holds {_STATIC}")
        if kind == "CLIPModel":
            raise CheckpointError(f"{directory} holds {_IMAGE_AND_TEXT}")
        if kind == "Transformer" and path:
            raise CheckpointError(
                f"{directory} has its encoder in {path}, where it is not looked for: move those files "
                "beside modules.json, and set the path of the Transformer in it to ''"
            )
    raise CheckpointError(f"{directory} holds no config.json: give the directory of one model")


def read_json(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    """Return the content of a JSON file; None where it can't be read: others will say so."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where there is none."""
    content = read_json(path)
    return content if isinstance(content, dict) else {}
