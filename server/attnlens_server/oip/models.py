"""Names of models and tensors.

A server has one model under several names, because each name declares the inputs that it requires: load
generators such as perf_analyzer fill all of them.
"""

from typing import NamedTuple

from attnlens_server.bundle import Bundle, OutputRole
from attnlens_server.errors import ModelNotFoundError

VERSION = "1"
PLATFORM = "onnx_onnxv1"

TEXT, TEXT_PAIR = "text", "text_pair"
INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS = "input_ids", "attention_mask", "token_type_ids"
EMBEDDING, EMBEDDING_ALIAS, CONTRIBUTIONS = "sentence_embedding", "embedding", "contributions"

BYTES, INT32, INT64, FP32 = "BYTES", "INT32", "INT64", "FP32"


class TensorType(NamedTuple):
    """Declaration of a tensor. -1 in the shape is a dynamic axis."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Signature(NamedTuple):
    """Tensors in the metadata of a model: required inputs, and outputs of requests that name none."""

    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]


class Models:
    """The names of one bundle.

    Attributes:
        signatures: Signature by name of the model.
        hidden_state: Name of the output with the token vectors.
        attentions: Layer by name of the output with its attention weights.
    """

    def __init__(self, bundle: Bundle) -> None:
        model, ids = bundle.model, (-1, -1)
        self._name = model.name
        hidden_state = model.outputs.hidden_state("embeddings")
        layers = model.outputs.layers(OutputRole.ATTENTION_WEIGHTS)
        self.hidden_state = hidden_state.name
        self.attentions = {output.name: layer for layer, output in sorted(layers.items())}
        texts = Signature(
            (TensorType(TEXT, BYTES, (-1,)),), (TensorType(EMBEDDING, FP32, (-1, model.embedding_size)),)
        )
        tokens = Signature(
            (TensorType(INPUT_IDS, INT64, ids), TensorType(ATTENTION_MASK, INT64, ids)),
            (TensorType(hidden_state.name, FP32, (*ids, model.hidden_size)),),
        )
        weights = tuple(
            TensorType(output.name, FP32, (-1, output.num_heads, *ids))
            for _, output in sorted(layers.items())
        )
        self.signatures = {
            model.name: texts if bundle.tokenizer_path else tokens,
            f"{model.name}_tokens": tokens,
            f"{model.name}_attentions": Signature(tokens.inputs, tokens.outputs + weights),
        }

    def signature(self, name: str, version: str) -> Signature:
        """Return the signature of a model. An empty name is that of the bundle.

        Raises:
            ModelNotFoundError: The name or the version is different.
        """
        name = name or self._name
        if name not in self.signatures:
            raise ModelNotFoundError(name, self._name)
        if version not in ("", VERSION):
            raise ModelNotFoundError(name, name, version, VERSION)
        return self.signatures[name]

    def default_outputs(self, name: str, *, has_text: bool) -> tuple[str, ...]:
        """Return the outputs of a request that names none.

        The bundle's own name also accepts token ids, because Triton serves a bundle's graph under that name.
        """
        signature = self.signatures[name or self._name]
        if not has_text and signature.inputs[0].name == TEXT:
            signature = self.signatures[f"{self._name}_tokens"]
        return tuple(output.name for output in signature.outputs)
