"""Names of models and tensors.

A server has one model under several names, because each name declares the inputs that it requires: load
generators such as perf_analyzer fill all of them.
"""

from attnlens.oip import open_inference_pb2 as pb
from attnlens_server.bundle import Bundle, OutputRole
from attnlens_server.errors import ModelNotFoundError

VERSION, PLATFORM = "1", "onnx_onnxv1"
TEXT, TEXT_PAIR = "text", "text_pair"
INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS = "input_ids", "attention_mask", "token_type_ids"
EMBEDDING, EMBEDDING_ALIAS, CONTRIBUTIONS = "sentence_embedding", "embedding", "contributions"
BYTES, INT32, INT64, FP32 = "BYTES", "INT32", "INT64", "FP32"

_TensorMetadata = pb.ModelMetadataResponse.TensorMetadata


class Models:
    """The names of one bundle.

    Attributes:
        metadata: Required inputs, and outputs of requests that name none, by name of the model.
        logits: Name of the output of a classifier, or "".
        hidden_state: Name of the output with the token vectors.
        layers: Layer by name of the output with its attention weights.
    """

    def __init__(self, bundle: Bundle) -> None:
        model, outputs = bundle.model, bundle.model.outputs
        self.hidden_state = outputs.hidden_state("embeddings").name
        attentions = outputs.layers(OutputRole.ATTENTION_WEIGHTS)
        self.layers = {output.name: layer for layer, output in sorted(attentions.items())}
        ids = [
            _TensorMetadata(name=name, datatype=INT64, shape=[-1, -1]) for name in (INPUT_IDS, ATTENTION_MASK)
        ]
        vectors = _TensorMetadata(name=self.hidden_state, datatype=FP32, shape=[-1, -1, model.hidden_size])
        weights = [
            _TensorMetadata(name=name, datatype=FP32, shape=[-1, attentions[layer].num_heads, -1, -1])
            for name, layer in self.layers.items()
        ]
        texts = [_TensorMetadata(name=TEXT, datatype=BYTES, shape=[-1])]
        result = _TensorMetadata(name=EMBEDDING, datatype=FP32, shape=[-1, model.embedding_size])
        self._name, self._tokens_name = model.name, f"{model.name}_tokens"
        self.logits = "" if outputs.logits is None else outputs.logits.name
        if model.classifier is not None:
            if model.classifier.is_reranker:
                texts.append(_TensorMetadata(name=TEXT_PAIR, datatype=BYTES, shape=[-1]))
            result = _TensorMetadata(
                name=self.logits, datatype=FP32, shape=[-1, len(model.classifier.labels)]
            )
        default = [result] if bundle.tokenizer_path or self.logits else [vectors]
        of_bundle = (texts if bundle.tokenizer_path else ids, default)
        tensors = {
            self._name: of_bundle,
            self._tokens_name: (ids, [vectors]),
            f"{model.name}_attentions": (ids, [vectors, *weights]),
        }
        self.metadata = {
            name: pb.ModelMetadataResponse(
                name=name, versions=[VERSION], platform=PLATFORM, inputs=inputs, outputs=outputs
            )
            for name, (inputs, outputs) in tensors.items()
        }

    def find(self, name: str, version: str) -> pb.ModelMetadataResponse:
        """Return the metadata of a model. An empty name means the bundle's own name.

        Raises:
            ModelNotFoundError: The name or the version is different.
        """
        name = name or self._name
        if name not in self.metadata:
            raise ModelNotFoundError(name, self._name)
        if version not in ("", VERSION):
            raise ModelNotFoundError(name, name, version, VERSION)
        return self.metadata[name]

    def default_outputs(self, metadata: pb.ModelMetadataResponse, *, has_text: bool) -> list[str]:
        """Return the outputs of a request that names none.

        The bundle's own name also accepts token ids, because Triton serves a bundle's graph under that name.
        """
        is_text = metadata.inputs[0].name == TEXT and not self.logits
        metadata = self.metadata[self._tokens_name] if is_text and not has_text else metadata
        return [output.name for output in metadata.outputs]
