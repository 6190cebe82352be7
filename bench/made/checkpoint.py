"""A randomly initialized BERT-base checkpoint with MiniLM's tokenizer.

Speed and numerical accuracy relative to fp32 do not require trained weights.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from bench.made.environments import DIRECTORY

CHECKPOINT = DIRECTORY / "base-checkpoint"
MAX_TOKENS = 512
SEED = 20_150_801
SIZES: dict[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": MAX_TOKENS,
}


def make_base_checkpoint(minilm: Path) -> Path:
    """Return the checkpoint directory, in sentence-transformers format. Created if missing."""
    if CHECKPOINT.exists():
        return CHECKPOINT
    import torch  # noqa: PLC0415 - slow import
    from transformers import BertConfig, BertModel  # noqa: PLC0415

    shutil.rmtree(unfinished := CHECKPOINT.with_name("base-checkpoint.unfinished"), ignore_errors=True)
    ignored = shutil.ignore_patterns("model.safetensors", "README.md", "data_config.json")
    shutil.copytree(minilm, unfinished, ignore=ignored)
    torch.manual_seed(SEED)
    vocab_size = json.loads((minilm / "config.json").read_text("utf-8"))["vocab_size"]
    config = BertConfig.from_dict({**SIZES, "vocab_size": vocab_size})
    BertModel(config).save_pretrained(unfinished)
    update_json(unfinished / "sentence_bert_config.json", max_seq_length=MAX_TOKENS)
    update_json(unfinished / "1_Pooling" / "config.json", word_embedding_dimension=config.hidden_size)
    unfinished.rename(CHECKPOINT)
    return CHECKPOINT


def update_json(path: Path, **values: object) -> None:
    """Update keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values, indent=2), encoding="utf-8")
