"""Decoder-only embedding models: the server returns the same vectors as transformers.

The checkpoints have random weights and the file layout of Qwen3-Embedding and EmbeddingGemma.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers, processors
from torch import nn

from attnlens.bundle import read_manifest
from attnlens_client import Client
from attnlens_export import ExportOptions, SourceError, export_bundle
from attnlens_export.check import check_bundle
from attnlens_export.graph.trace import trace
from attnlens_export.parity.grid import small_grid
from attnlens_model import load_checkpoint
from attnlens_server import local
from attnlens_server.text import TextEncoder
from odd_models import OddModel
from served import ServerProcess
from small_bundles import TOKENIZERS
from small_files import read, write

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

MAX_TOKENS = 120
END = "<|endoftext|>"
QWEN3 = OddModel(
    "Qwen3",
    {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20, "num_hidden_layers": 2}
    | {"vocab_size": 301, "max_position_embeddings": MAX_TOKENS, "pad_token_id": 300, "eos_token_id": 300},
)
GEMMA = OddModel(
    "Gemma3Text",
    {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "query_pre_attn_scalar": 20}
    | {"num_hidden_layers": 2, "vocab_size": 301, "max_position_embeddings": MAX_TOKENS, "pad_token_id": 1}
    | {"use_bidirectional_attention": True, "sliding_window": 8, "sliding_window_pattern": 2},
    std=0.1,
)
# For each checkpoint: text template, pooling, dense layer widths and prompts.
TEMPLATES = {"qwen3": f"$A {END}", "gemma3_text": "<s> $A </s>"}
POOLINGS = {"qwen3": "lasttoken", "gemma3_text": "mean_tokens"}
DENSE: Mapping[str, list[tuple[int, int]]] = {"qwen3": [], "gemma3_text": [(96, 200), (200, 64)]}
PROMPTS = {
    "qwen3": {"query": "Instruct: Given a question, retrieve what answers it\nQuery:", "document": ""},
    "gemma3_text": {"query": "task: search result | query: ", "document": "title: none | text: "},
}
TEXTS = ["A cat.", "", "It rained, so the street was wet; nobody went.", "word " * 120, "Zoë 東京 😀"]


def save_tokenizer(directory: Path, template: str) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZERS / "byte-level" / "tokenizer.json"))
    tokenizer.add_special_tokens([END])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = [token for token in ("<s>", "</s>", END) if token in template]
    ids: Any = [(name, tokenizer.token_to_id(name)) for name in names]
    ending = processors.TemplateProcessing(single=template, pair=f"{template} $B:1", special_tokens=ids)
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), ending])
    special = {"eos_token": "</s>" if "</s>" in names else END}
    special["pad_token"] = "<pad>" if "</s>" in names else END
    load: Any = transformers.PreTrainedTokenizerFast
    wrapped = load(tokenizer_object=tokenizer, model_max_length=MAX_TOKENS, padding_side="left", **special)
    wrapped.save_pretrained(directory)


def save_checkpoint(name: str, odd: OddModel, directory: Path) -> None:
    """Write the files that the publishers distribute, without their libraries."""
    odd.make().save_pretrained(directory)
    save_tokenizer(directory, TEMPLATES[name])
    if name == "qwen3":  # the published tokenizer.json adds the token that this setting requests
        config = directory / "tokenizer_config.json"
        write(config, read(config) | {"add_eos_token": True})
    kinds = ["Transformer", "Pooling", *("Dense" for _ in DENSE[name]), "Normalize"]
    paths = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index)]
    write(
        directory / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
        ],
    )
    pooling = {"word_embedding_dimension": 96, f"pooling_mode_{POOLINGS[name]}": True, "include_prompt": True}
    write(directory / "1_Pooling" / "config.json", pooling)
    prompts = {"prompts": PROMPTS[name], "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write(directory / "config_sentence_transformers.json", prompts)
    generator = torch.Generator().manual_seed(3)
    for index, (width, out) in enumerate(DENSE[name], start=2):
        settings: dict[str, Any] = {"in_features": width, "out_features": out, "bias": False}
        settings["activation_function"] = "torch.nn.modules.linear.Identity"
        write(directory / f"{index}_Dense" / "config.json", settings)
        weight = 0.1 * torch.randn(out, width, generator=generator)
        save_file({"linear.weight": weight}, directory / f"{index}_Dense" / "model.safetensors")


class Published:
    """A checkpoint and its reference embeddings."""

    def __init__(self, name: str, odd: OddModel, directory: Path) -> None:
        self.name, self.source, self.bundle = name, directory / "source", directory / "bundle"
        save_checkpoint(name, odd, self.source)
        if name == "qwen3":
            config = read(self.source / "config.json")
            write(self.source / "config.json", config | {"architectures": ["Qwen3ForCausalLM"]})
        export_bundle(self.source, self.bundle, ExportOptions(grid=small_grid(MAX_TOKENS)))

    def embed(self, texts: list[str]) -> npt.NDArray[np.float32]:
        """Compute embeddings with transformers and left padding, as configured by the tokenizer."""
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(self.source)
        model: Any = transformers.AutoModel.from_pretrained(self.source).eval()
        batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        mask = batch["attention_mask"]
        assert (mask[:, -1] == 1).all()
        assert not (mask == 1).all()
        with torch.no_grad():
            hidden = model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
        weights = mask[:, :, None].float()
        pooled = hidden[:, -1] if self.name == "qwen3" else (hidden * weights).sum(1) / weights.sum(1)
        for index, _ in enumerate(DENSE[self.name], start=2):
            weight = load_file(self.source / f"{index}_Dense" / "model.safetensors")["linear.weight"]
            pooled = pooled @ weight.T
        return np.asarray(nn.functional.normalize(pooled, dim=-1).numpy())


@pytest.fixture(scope="module", params=[("qwen3", QWEN3), ("gemma3_text", GEMMA)], ids=lambda each: each[0])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    name, odd = request.param
    return Published(name, odd, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def client(published: Published) -> Iterator[Client]:
    with ServerProcess(published.bundle) as server, Client(server.address) as client:
        yield client


def test_vectors_match_transformers_with_the_original_pooling_and_padding(
    published: Published, client: Client
) -> None:
    manifest = read_manifest(published.bundle)
    assert manifest.architecture.is_causal == (published.name == "qwen3")
    assert dict(manifest.prompts) == PROMPTS[published.name]
    for prompt_name, prompt in PROMPTS[published.name].items():
        found = client.embed(TEXTS, prompt_name=prompt_name, truncate=True)
        expected = published.embed([prompt + text for text in TEXTS])
        np.testing.assert_allclose(found, expected, atol=1e-5)
        # One text per call, which avoids padding.
        alone = np.stack([client.embed([text], prompt_name=prompt_name, truncate=True)[0] for text in TEXTS])
        np.testing.assert_allclose(alone, expected, atol=1e-5)
    assert found.shape[1] == (96 if published.name == "qwen3" else 64)


def test_vectors_match_sentence_transformers(published: Published, client: Client) -> None:
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - slow import

    reference = SentenceTransformer(str(published.source), device="cpu")
    for name in PROMPTS[published.name]:
        found = client.embed(TEXTS, prompt_name=name, truncate=True)
        np.testing.assert_allclose(found, reference.encode(TEXTS, prompt_name=name), atol=1e-5)


def test_end_token_stays_last_when_a_text_is_truncated(published: Published) -> None:
    manifest = read_manifest(published.bundle)
    text_encoder = TextEncoder(published.bundle / "tokenizer.json", manifest.max_tokens)
    name = END if published.name == "qwen3" else "</s>"
    end = Tokenizer.from_file(str(published.bundle / "tokenizer.json")).token_to_id(name)
    ids = [list(each.input_ids) for each in text_encoder.encode([(text,) for text in TEXTS])]
    assert [each[-1] for each in ids] == [end] * len(TEXTS)
    assert [each.count(end) for each in ids] == [1] * len(TEXTS)
    assert len(ids[3]) == MAX_TOKENS


def test_bundle_of_a_decoder_passes_a_check(published: Published) -> None:
    assert check_bundle(published.bundle, grid=small_grid(MAX_TOKENS)).verdict.passed
    content = json.loads((published.bundle / "config.json").read_text())
    assert content["model_type"] == published.name


def test_end_token_added_only_by_older_libraries_is_rejected(tmp_path: Path) -> None:
    small = replace(QWEN3, changes=QWEN3.changes | {"num_hidden_layers": 1})
    small.make().save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "tokenizer_config.json"
    checkpoint = load_checkpoint(tmp_path / "source")
    graph = trace(checkpoint.encoder, checkpoint.config)  # shared by both exports
    options = ExportOptions(pooling="last_token", grid=small_grid(7), tracer=lambda *_: graph)
    save_tokenizer(tmp_path / "source", "$A")
    write(path, read(path) | {"add_eos_token": True, "eos_token": END})
    with pytest.raises(
        SourceError, match=r"sets add_eos_token, but tokenizer.json does not append <\|endoftext\|>"
    ):
        export_bundle(tmp_path / "source", tmp_path / "other", options)
    write(path, read(path) | {"add_eos_token": False})
    export_bundle(tmp_path / "source", tmp_path / "other", options)


def test_pairs_are_joined_and_truncated_as_in_cross_encoder(tmp_path: Path) -> None:
    """Its tokenizer adds no token between the texts, and removes the beginning of a long document."""
    from sentence_transformers import CrossEncoder  # noqa: PLC0415 - slow

    source = tmp_path / "source"
    replace(QWEN3, changes=QWEN3.changes | {"num_labels": 1, "num_hidden_layers": 1}).make(
        "ForSequenceClassification"
    ).save_pretrained(source)
    save_tokenizer(source, "$A")
    config = source / "tokenizer_config.json"
    write(config, read(config) | {"truncation_side": "left"})
    export_bundle(source, tmp_path / "bundle", ExportOptions(grid=small_grid(24), faithfulness=False))
    query, documents = "Who ran?", ["A cat.", "Zoë 東京 😀", "the man and the sea " * 20]
    pairs = [(query, document) for document in documents]
    logits = CrossEncoder(str(source), device="cpu").predict(pairs, activation_fn=nn.Identity())
    with local(tmp_path / "bundle", threads=1) as model:
        result = model.score(query, documents)
        np.testing.assert_allclose(result.logits, logits, atol=1e-5)
        assert result.usages[2].num_tokens == MAX_TOKENS < result.usages[2].num_tokens_total
        np.testing.assert_allclose(
            model.classify(pairs, truncate=True).logits[:, 0], result.logits, atol=1e-5
        )
