"""Small published checkpoints, one per layout of their publisher's pipeline."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from odd_models import OddModel
from small_bundles import ONE_LAYER, TOKENIZERS
from small_files import read, write

SPECIAL = {f"{name.lower()}_token": f"[{name}]" for name in ("UNK", "SEP", "PAD", "CLS", "MASK")}
ROBERTA = {"type_vocab_size": 1}
PROMPTS = {"query": "question: ", "passage": "passage: "}


def edit(path: Path, **values: object) -> None:
    """Set keys of a JSON file."""
    write(path, (read(path) if path.is_file() else {}) | values)


def save(model: OddModel, directory: Path, tokenizer: str, kind: str | None = None) -> int:
    """Save a model with a tokenizer that truncates at 32 tokens. Return its hidden size."""
    made = model.make(kind)
    made.save_pretrained(directory)
    shutil.copytree(TOKENIZERS / tokenizer, directory, dirs_exist_ok=True)
    edit(directory / "tokenizer_config.json", model_max_length=32)
    return int(made.config.hidden_size)


def add_modules(directory: Path, width: int, mode: str, *kinds: str) -> None:
    """Write the files of a SentenceTransformer with a Pooling module and further modules."""
    paths = {"Transformer": "", "Pooling": "1_Pooling"} | {
        kind: f"{index}_{kind}" for index, kind in enumerate(kinds, 2)
    }
    library = "sentence_transformers.models."
    write(
        directory / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": library + kind}
            for index, (kind, path) in enumerate(paths.items())
        ],
    )
    write(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": width, "pooling_mode": mode})
    edit(directory / "sentence_bert_config.json", max_seq_length=32)
    for kind in kinds:
        (directory / paths[kind]).mkdir()
    if "Dense" in kinds:
        generator = np.random.default_rng(0)
        settings = {"in_features": width, "out_features": 24, "bias": True}
        write(
            directory / paths["Dense"] / "config.json",
            settings | {"activation_function": "torch.nn.modules.activation.Tanh"},
        )
        tensors = {
            "linear.weight": generator.normal(size=(24, width)).astype(np.float32),
            "linear.bias": generator.normal(size=24).astype(np.float32),
        }
        safetensors.numpy.save_file(
            tensors, directory / paths["Dense"] / "model.safetensors", {"format": "pt"}
        )


def mean_with_prompts(directory: Path) -> None:
    add_modules(directory, save(OddModel("Bert", ONE_LAYER), directory, "wordpiece"), "mean")
    edit(
        directory / "config_sentence_transformers.json",
        prompts=PROMPTS,
        default_prompt_name="query",
        similarity_fn_name="cosine",
    )


def cls_without_trimming(directory: Path) -> None:
    model = OddModel("Roberta", ONE_LAYER | ROBERTA)
    add_modules(directory, save(model, directory, "byte-level"), "cls", "Normalize")


def dense(directory: Path) -> None:
    width = save(OddModel("Bert", ONE_LAYER), directory, "wordpiece")
    add_modules(directory, width, "mean", "Dense", "Normalize")


def last_token(directory: Path) -> None:
    model = OddModel("Qwen3", ONE_LAYER | {"num_key_value_heads": 1, "head_dim": 32}, std=0.1)
    add_modules(directory, save(model, directory, "byte-level"), "lasttoken", "Normalize")


CHAT_TEMPLATE = (
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% else %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for message in messages if message.role != 'system' %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
)
"""The template of Qwen 2.5, shortened: it has a system message if there is no prompt."""


def save_decoder(directory: Path, template: str = CHAT_TEMPLATE) -> None:
    """Save a decoder whose tokenizer has a chat template, before sentence-transformers adds its files."""
    sizes = {"num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 96, "vocab_size": 302}
    OddModel("Qwen3", ONE_LAYER | sizes, std=0.1).make().save_pretrained(directory)
    shutil.copytree(TOKENIZERS / "byte-level", directory, dirs_exist_ok=True)
    content = read(directory / "tokenizer.json")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    content["added_tokens"] += [
        {"id": number, "content": token} | flags
        for number, token in enumerate(("<|im_start|>", "<|im_end|>"), len(content["model"]["vocab"]))
    ]
    write(directory / "tokenizer.json", content)
    edit(directory / "tokenizer_config.json", model_max_length=80)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def chat_template(directory: Path) -> None:
    """Let sentence-transformers save a decoder, which writes that texts are inserted into the template."""
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - slow
    from sentence_transformers.base.modules import Transformer  # noqa: PLC0415 - slow
    from sentence_transformers.sentence_transformer.modules import Pooling  # noqa: PLC0415 - slow

    plain = directory.parent / "plain"
    save_decoder(plain)
    modules = [Transformer(str(plain)), Pooling(160, "lasttoken")]
    prompts = {"query": "Find the answer."}
    SentenceTransformer(modules=modules, device="cpu", prompts=prompts).save(str(directory))


def sparse_attention(directory: Path) -> None:
    model = OddModel("Longformer", ONE_LAYER | {"attention_window": [8], "pad_token_id": 0})
    add_modules(directory, save(model, directory, "wordpiece"), "mean")


def cross_encoder(directory: Path) -> None:
    model = OddModel("Bert", ONE_LAYER | {"num_labels": 1})
    save(model, directory, "wordpiece", "ForSequenceClassification")
    activation = {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "6.0.0"}
    edit(directory / "config.json", sentence_transformers=activation)


def classifier(directory: Path) -> None:
    labels = dict(enumerate(["art", "law", "sea"]))
    model = OddModel("Bert", ONE_LAYER | {"id2label": labels})
    save(model, directory, "wordpiece", "ForSequenceClassification")


def plain_encoder(directory: Path) -> None:
    save(OddModel("XLMRoberta", ONE_LAYER | ROBERTA), directory, "unigram")


def t5_encoder(directory: Path) -> None:
    sizes = {"num_layers": 1, "d_ff": 160, "n_positions": 40, "d_kv": 20}
    save(OddModel("T5", sizes, kind="EncoderModel", std=0.05), directory, "unigram")


LAYOUTS: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "mean with prompts": (mean_with_prompts, {}),
    "cls": (cls_without_trimming, {}),
    "dense": (dense, {}),
    "last token": (last_token, {}),
    "sparse attention": (sparse_attention, {"global_tokens": 2}),
    "cross-encoder": (cross_encoder, {}),
    "classifier": (classifier, {}),
    "plain encoder": (plain_encoder, {"pooling": "mean"}),
    "T5 encoder": (t5_encoder, {"pooling": "mean"}),
}
"""Functions that write a checkpoint, and the options that its export needs."""


def make(layout: str, directory: Path) -> Path:
    """Write the checkpoint of a layout to `directory / "source"`."""
    source = directory / "source"
    LAYOUTS[layout][0](source)
    return source


def export_options(layout: str, **options: Any) -> dict[str, Any]:
    """Return options of an export with the comparison, and without measurements that it does not need."""
    return LAYOUTS[layout][1] | {"faithfulness": False, "comparison": True} | options
