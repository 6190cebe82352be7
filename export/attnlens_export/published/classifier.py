"""Reads classification heads from checkpoints and stores them in bundles.

A head pools the token vectors and applies one or more linear layers. The last layer returns the logits, one
per label. A bundle stores each layer like a dense layer of an embedding model, in `classifier/0`,
`classifier/1`, ..., and the pooling, labels and activation in `classifier/config.json`.
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnlens.v1.manifest_pb2 import Activation, Classifier, Dense, Pooling, PoolingDefaults
from attnlens_export.errors import SourceError
from attnlens_export.graph.names import ATTENTIONS_PATH, CONTRIBUTIONS_PATH, ENCODER_PATH
from attnlens_export.json_files import read_object, write_json
from attnlens_export.published.dense import NORM_WEIGHTS, Weights, read_dense, write_dense
from attnlens_export.published.modules import MODULES_FILE, listed_kinds
from attnlens_export.published.prompts import PROMPTS_FILE
from attnlens_model.checkpoint.tensor_files import read_tensors

DIRECTORY = "classifier"
FEATURE = "classifier"
"""Entry in `Manifest.required_features`. Readers that ignore the head would serve meaningless embeddings."""
_SUFFIX = "ForSequenceClassification"
_CROSS_ENCODER = "CrossEncoder"  # `model_type` written by sentence-transformers
_OLDEST_KEY = "sbert_ce_default_activation_function"  # written by sentence-transformers before 4.0
_WITHOUT = "add --without-head and a --pooling to export only the encoder"


@dataclass(frozen=True)
class Layer:
    """A linear layer of a head.

    Attributes:
        module: Name of the linear module in the checkpoint.
        activation: Activation, or `KEY=DEFAULT` to read it from `config.json`.
        norm: Name of the layer normalization after the activation. Empty without normalization.
    """

    module: str
    activation: str = "identity"
    norm: str = ""


@dataclass(frozen=True)
class Layout:
    """Structure of the classification head of one model class.

    Attributes:
        layers: Linear layers, in order of application.
        pooling: Pooling, or `KEY=DEFAULT` to read it from `config.json`.
    """

    layers: tuple[Layer, ...]
    pooling: str = "cls"


def _pooler(module: str, activation: str = "tanh") -> Layout:
    return Layout((Layer(module, activation), Layer("classifier")))


def _dense_head(activation: str = "tanh") -> Layout:
    return Layout((Layer("classifier.dense", activation), Layer("classifier.out_proj")))


_LAST_TOKEN = Layout((Layer("score"),), "last_token")

# Keys are class names without their suffix. Module names follow transformers 5.23.
LAYOUTS: Mapping[str, Layout] = {
    "Albert": _pooler("albert.pooler"),
    "Bert": _pooler("bert.pooler.dense"),
    "BigBird": _dense_head("hidden_act=gelu_new"),
    "Camembert": _dense_head(),
    "Data2VecText": _dense_head(),
    "Deberta": _pooler("pooler.dense", "pooler_hidden_act=gelu"),
    "DebertaV2": _pooler("pooler.dense", "pooler_hidden_act=gelu"),
    "DistilBert": _pooler("pre_classifier", "relu"),
    "Electra": _dense_head("gelu"),
    "Ernie": _pooler("ernie.pooler.dense"),
    "EuroBert": Layout((Layer("dense", "gelu"), Layer("classifier")), "classifier_pooling=late"),
    "GPT2": _LAST_TOKEN,
    "Gemma3Text": _LAST_TOKEN,
    "Gte": _pooler("gte.pooler.dense"),
    "JinaEmbeddingsV3": _dense_head(),
    "Llama": _LAST_TOKEN,
    "Longformer": _dense_head(),
    "MPNet": _dense_head(),
    "MegatronBert": _pooler("bert.pooler.dense"),
    "Mistral": _LAST_TOKEN,
    "ModernBert": Layout(
        (Layer("head.dense", "classifier_activation=gelu", "head.norm"), Layer("classifier")),
        "classifier_pooling=cls",
    ),
    "New": _pooler("new.pooler.dense"),
    "NomicBert": _pooler("nomic_bert.pooler.dense"),
    "Qwen2": _LAST_TOKEN,
    "Qwen3": _LAST_TOKEN,
    "RemBert": _pooler("rembert.pooler.dense"),
    "RoFormer": _dense_head("hidden_act=gelu"),
    "Roberta": _dense_head(),
    "RobertaPreLayerNorm": _dense_head(),
    "Ultrabert": Layout((Layer("classifier"),), "classifier_pooling=cls"),
    "XLMRoberta": _dense_head(),
    "XLMRobertaXL": _dense_head(),
}
_POOLINGS = {
    "cls": Pooling.POOLING_CLS,
    "bos": Pooling.POOLING_CLS,
    "mean": Pooling.POOLING_MEAN,
    "last_token": Pooling.POOLING_LAST_TOKEN,
    "first": Pooling.POOLING_CLS,
    "last": Pooling.POOLING_LAST_TOKEN,
}
_ACTIVATIONS = {
    "identity": Activation.ACTIVATION_IDENTITY,
    "tanh": Activation.ACTIVATION_TANH,
    "relu": Activation.ACTIVATION_RELU,
    "gelu": Activation.ACTIVATION_GELU,
    "gelu_new": Activation.ACTIVATION_GELU_TANH,
    "gelu_pytorch_tanh": Activation.ACTIVATION_GELU_TANH,
    "silu": Activation.ACTIVATION_SILU,
    "swish": Activation.ACTIVATION_SILU,
}
# Functions that convert logits to scores, by class name in torch.nn.
SCORE_ACTIVATIONS = {
    "Identity": Activation.ACTIVATION_IDENTITY,
    "Sigmoid": Activation.ACTIVATION_SIGMOID,
    "Softmax": Activation.ACTIVATION_SOFTMAX,
}


@dataclass(frozen=True)
class Head:
    """A classification head with its weights.

    Attributes:
        classifier: Labels, and the activation that converts logits to scores.
        pooling: Pooling and linear layers. Layer paths are relative to the bundle directory.
        weights: Weights of each layer.
    """

    classifier: Classifier
    pooling: PoolingDefaults
    weights: tuple[Weights, ...]


def find_classifier(directory: Path, unused_tensors: Collection[str] = ()) -> Layout | None:
    """Return the layout of a checkpoint's classification head, or None if it is missing or unsupported.

    Args:
        directory: Checkpoint directory.
        unused_tensors: Names of checkpoint tensors that the encoder does not use.
    """
    name = _architecture(read_object(directory / "config.json"))
    if not name.endswith(_SUFFIX):
        return None
    return LAYOUTS.get(name.removesuffix(_SUFFIX)) or _derive(directory, unused_tensors)


def is_derived(directory: Path) -> bool:
    """Return whether only the names of tensors describe the head, so that its logits must be compared."""
    name = _architecture(read_object(directory / "config.json"))
    return name.removesuffix(_SUFFIX) not in LAYOUTS and "score.weight" not in read_tensors(directory)


def _derive(directory: Path, unused_tensors: Collection[str]) -> Layout | None:
    """Return the layout of transformers that has the tensors of a head, or None."""
    names = {*unused_tensors, *(name for name in read_tensors(directory) if ".pooler." in name)}
    weights = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
    poolers = [name for name in weights if name.endswith(".pooler.dense")]
    if "score" in weights:
        return _LAST_TOKEN  # nearly all decoders share a class with this head
    if {"classifier.dense", "classifier.out_proj"} <= weights:
        return _dense_head()
    if "classifier" in weights and len(poolers) == 1:
        return _pooler(poolers[0])
    if "sequence_summary.summary" in weights:
        summary = Layer("sequence_summary.summary", "summary_activation=identity")
        return Layout((summary,), "summary_type=first")
    return None


def is_part(layout: Layout, tensor: str) -> bool:
    """Return whether a checkpoint tensor belongs to the head."""
    modules = (name for layer in layout.layers for name in (layer.module, layer.norm) if name)
    return tensor.rpartition(".")[0] in modules


def read_head(directory: Path, layout: Layout, hidden_size: int) -> Head:
    """Read the classification head of a checkpoint.

    Raises:
        SourceError: A tensor is missing or has the wrong shape, or a setting is unsupported.
        CheckpointError: The weights can't be read.
    """
    config = read_object(directory / "config.json")
    if others := listed_kinds(directory)[1:]:
        raise SourceError(
            f"the checkpoint has the module {others[0]} after its classification head, which bundles do not "
            f"support: {_WITHOUT}"
        )
    tensors = read_tensors(directory)
    defaults = PoolingDefaults(pooling=_choice(config, layout.pooling, _POOLINGS, "pooling"))
    weights, width = [], hidden_size
    for index, layer in enumerate(layout.layers):
        arrays = _read_layer(tensors, layer, width)
        width = len(arrays["linear.weight"])
        dense = Dense(
            path=f"{DIRECTORY}/{index}",
            in_features=arrays["linear.weight"].shape[1],
            out_features=width,
            bias="linear.bias" in arrays,
            activation=_choice(config, layer.activation, _ACTIVATIONS, "activation"),
            norm_epsilon=float(config.get("norm_eps", 1e-5)) if layer.norm else 0.0,
        )
        defaults.dense.append(dense)
        weights.append(arrays)
    labels = read_labels(config)
    if len(labels) != width:
        raise SourceError(
            f"{directory / 'config.json'} names {len(labels)} labels, but {layout.layers[-1].module} returns "
            f"{width} logits: correct id2label, or {_WITHOUT}"
        )
    classifier = Classifier(labels=labels, activation=read_activation(directory, len(labels)))
    return Head(classifier, defaults, tuple(weights))


def read_labels(config: Mapping[str, Any]) -> list[str]:
    """Return the labels in the order of the logits.

    Raises:
        SourceError: `id2label` is invalid.
    """
    named = config.get("id2label")
    if named is None:
        return [f"LABEL_{index}" for index in range(int(config.get("num_labels", 2)))]
    try:
        by_index = {int(index): str(label) for index, label in named.items()}
        return [by_index[index] for index in range(len(by_index))]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SourceError(
            f"config.json: id2label must map the indices 0, 1, ... to labels, but is {named!r}: correct it"
        ) from error


def read_activation(directory: Path, num_labels: int) -> Activation.ValueType:
    """Return the function that converts logits to scores.

    Three locations exist, because sentence-transformers moved this setting twice; the newest one takes
    precedence. If the setting is missing, cross-encoders use the default of sentence-transformers, and other
    classifiers use the default of the transformers pipelines.

    Raises:
        SourceError: The checkpoint specifies an unsupported function.
    """
    config, published = read_object(directory / "config.json"), read_object(directory / PROMPTS_FILE)
    is_cross_encoder = published.get("model_type") == _CROSS_ENCODER
    stated = published.get("activation_fn") if is_cross_encoder else None
    if not stated:
        older = config.get("sentence_transformers")
        oldest = config.get(_OLDEST_KEY)
        is_cross_encoder = is_cross_encoder or isinstance(older, dict) or oldest is not None
        # A null value in the newer location overrides the older setting.
        stated = older["activation_fn"] if isinstance(older, dict) and "activation_fn" in older else oldest
    if stated:
        stated = str(stated)
        name = stated.rpartition(".")[2]
        if not stated.startswith("torch.nn.") or name not in SCORE_ACTIVATIONS:
            raise SourceError(
                f"the checkpoint computes scores with {stated!r}, but bundles support only "
                f"{', '.join(SCORE_ACTIVATIONS)} from torch.nn: change activation_fn in its configuration"
            )
        return SCORE_ACTIVATIONS[name]
    problem = config.get("problem_type")
    if is_cross_encoder:
        return SCORE_ACTIVATIONS["Sigmoid" if num_labels == 1 else "Identity"]
    if problem == "regression":
        return SCORE_ACTIVATIONS["Identity"]
    is_single = num_labels > 1 and problem != "multi_label_classification"
    return SCORE_ACTIVATIONS["Softmax" if is_single else "Sigmoid"]


def write_head(directory: Path, head: Head) -> None:
    """Write a head to a bundle."""
    for dense, weights in zip(head.pooling.dense, head.weights, strict=True):
        (directory / dense.path).mkdir(parents=True)
        write_dense(directory, dense.path, dense, weights)
    settings = {
        "pooling": Pooling.Name(head.pooling.pooling).removeprefix("POOLING_").lower(),
        "num_layers": len(head.weights),
        "labels": list(head.classifier.labels),
        "activation": Activation.Name(head.classifier.activation).removeprefix("ACTIVATION_").lower(),
    }
    write_json(directory / DIRECTORY / "config.json", settings)


def write_classifier_files(directory: Path, source: Path, head: Head) -> None:
    """Write the settings that sentence-transformers needs to compute the same scores from the bundle."""
    if (source / MODULES_FILE).is_file():
        shutil.copyfile(source / MODULES_FILE, directory / MODULES_FILE)
    if len(head.classifier.labels) > 1:
        return
    config = read_object(directory / "config.json")
    older = config.get("sentence_transformers")
    name = next(name for name, value in SCORE_ACTIVATIONS.items() if value == head.classifier.activation)
    module = "linear" if name == "Identity" else "activation"
    settings = {"activation_fn": f"torch.nn.modules.{module}.{name}"}
    config["sentence_transformers"] = (older if isinstance(older, dict) else {}) | settings
    write_json(directory / "config.json", config)


def has_head(directory: Path | None) -> bool:
    """Return whether a directory is a bundle with a classification head."""
    return directory is not None and (directory / DIRECTORY / "config.json").is_file()


def read_stored_classifier(directory: Path) -> Classifier | None:
    """Return the labels and activation of a bundle's head, or None for an embedding model."""
    if not has_head(directory):
        return None
    settings = read_object(directory / DIRECTORY / "config.json")
    activation = Activation.Value(f"ACTIVATION_{str(settings['activation']).upper()}")
    return Classifier(labels=settings["labels"], activation=activation)


def num_logits(directory: Path, path: str) -> int:
    """Return the number of logits that a bundle's graph returns, or 0 if the graph does not return logits."""
    classifier = read_stored_classifier(directory)
    returns_logits = path not in (ENCODER_PATH, ATTENTIONS_PATH, CONTRIBUTIONS_PATH)
    return len(classifier.labels) if classifier and returns_logits else 0


def read_stored_pooling(directory: Path, hidden_size: int) -> PoolingDefaults:
    """Return the pooling and linear layers of a bundle's head.

    Raises:
        SourceError: A file is invalid.
    """
    settings = read_object(directory / DIRECTORY / "config.json")
    defaults = PoolingDefaults(pooling=Pooling.Value(f"POOLING_{str(settings['pooling']).upper()}"))
    width = hidden_size
    for index in range(int(settings["num_layers"])):
        layer = read_dense(directory, f"{DIRECTORY}/{index}", width, normalize_input=False)
        defaults.dense.append(layer)
        width = layer.out_features
    return defaults


def _architecture(config: Mapping[str, Any]) -> str:
    classes = config.get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else ""


def _choice(config: Mapping[str, Any], name: str, known: Mapping[str, Any], setting: str) -> Any:  # noqa: ANN401
    key, is_key, default = name.partition("=")
    value = config.get(key) if is_key else name
    value = default if value is None else value
    if value not in known:
        raise SourceError(
            f"config.json: the {setting} of the head is {key} = {value!r}, but bundles support only "
            f"{', '.join(known)}: {_WITHOUT}"
        )
    return known[value]


def _read_layer(tensors: Mapping[str, Any], layer: Layer, in_features: int) -> Weights:
    """Return the weights of a layer, keyed by their names in a bundle."""
    names = {"linear.weight": f"{layer.module}.weight", "linear.bias": f"{layer.module}.bias"}
    if layer.norm:
        names |= dict(zip(NORM_WEIGHTS, (f"{layer.norm}.weight", f"{layer.norm}.bias"), strict=True))
    required = [name for name in names.values() if not name.endswith(".bias")]
    missing: Sequence[str] = [name for name in required if name not in tensors]
    if missing:
        raise SourceError(
            f"the classification head of the checkpoint lacks {', '.join(missing)}: fine-tune the checkpoint "
            f"for the task, or {_WITHOUT}"
        )
    weights: Weights = {
        ours: tensors[theirs].float().contiguous().numpy()
        for ours, theirs in names.items()
        if theirs in tensors
    }
    size = weights["linear.weight"].shape
    if len(size) != 2 or size[1] != in_features:  # noqa: PLR2004 - a matrix
        raise SourceError(
            f"{layer.module}.weight has shape {tuple(size)} instead of (labels or features, "
            f"{in_features}): the checkpoint is damaged"
        )
    if layer.norm:
        weights.setdefault("norm.bias", np.zeros(size[0], np.float32))
    for name, array in weights.items():
        if not np.isfinite(array).all():
            raise SourceError(f"{names[name]} contains NaN or infinity: download the checkpoint again")
    return weights
