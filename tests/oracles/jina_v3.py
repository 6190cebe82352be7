"""A checkpoint of Jina embeddings v3 in its published layout: adapters of five tasks for each weight.

Sturua et al. 2024, https://arxiv.org/abs/2409.10173; the names and shapes are those of the publisher's
`modeling_lora.py`, which was read and is not run here. The encoder for a task is `transformers`' own, with
weights that were merged here, in float64.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from odd_models import OddModel

TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
RANK, ALPHA = 3, 2
ODD = OddModel("JinaEmbeddingsV3", {"num_hidden_layers": 2}, std=0.1)
_HUB_KEYS = {
    "model_type": "xlm-roberta",
    "architectures": ["XLMRobertaLoRA"],
    "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "load_trained_adapters": True,
    "lora_adaptations": list(TASKS),
    "lora_alpha": ALPHA,
    "lora_rank": RANK,
}


def write_checkpoint(directory: Path) -> dict[str, dict[str, Tensor]]:
    """Write it; return the tensors of each task and of none, without `roberta.` before their names."""
    ODD.make().save_pretrained(directory)
    plain = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(11)
    stored: dict[str, Tensor] = {}
    merged: dict[str, dict[str, Tensor]] = {task: {} for task in (*TASKS, "none")}
    for name, tensor in plain.items():
        for tensors in merged.values():
            tensors[name] = tensor
        module, _, kind = name.rpartition(".")
        if kind != "weight" or tensor.ndim == 1:
            stored[f"roberta.{name}"] = tensor.clone()
            continue
        rows, columns = tensor.shape
        is_table = "_embeddings" in module
        first_shape = (rows, RANK) if is_table else (RANK, columns)
        second_shape = (RANK, columns) if is_table else (rows, RANK)
        first = torch.randn(len(TASKS), *first_shape, generator=generator) * 0.1
        second = torch.randn(len(TASKS), *second_shape, generator=generator) * 0.1
        prefix = f"roberta.{module}.parametrizations.weight"
        stored |= {f"{prefix}.original": tensor.clone(), f"{prefix}.0.lora_A": first}
        stored[f"{prefix}.0.lora_B"] = second
        for index, task in enumerate(TASKS):
            a, b = first[index].double(), second[index].double()
            update = a @ b if is_table else b @ a
            merged[task][name] = (tensor.double() + ALPHA / RANK * update).float()
    save_file(stored, directory / "model.safetensors")
    change_config(directory, _HUB_KEYS)
    return merged


def change_config(directory: Path, changes: dict[str, Any]) -> None:
    """Write changes into `config.json`; None takes a key away."""
    content = json.loads((directory / "config.json").read_text("utf-8")) | changes
    content = {key: value for key, value in content.items() if value is not None and key != "rope_parameters"}
    (directory / "config.json").write_text(json.dumps(content), "utf-8")
