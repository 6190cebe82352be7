"""ERNIE 1.0 to 3.0: BERT with an optional task embedding that is added to every token.

Sun et al. 2019, https://arxiv.org/abs/1904.09223; Sun et al. 2019, https://arxiv.org/abs/1907.12412; Sun et
al. 2021, https://arxiv.org/abs/2107.02137. The task is always 0, the default of the published implementation,
which embedding models never override.
"""

from collections.abc import Mapping
from dataclasses import replace

from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import COMMON_PREFIXES

_DEFAULT_TASKS = 3

_CONFIG = ConfigTable(keys=bert.KEYS, required_values=bert.REQUIRED_VALUES)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    num_tasks = content.get("task_type_vocab_size", _DEFAULT_TASKS) if content.get("use_task_id") else 0
    return _CONFIG.read(content) | {"embeddings.task_vocab_size": num_tasks}


def _write_config(fields: Mapping[str, object]) -> dict[str, object]:
    num_tasks = fields["embeddings.task_vocab_size"]
    return _CONFIG.write(fields) | {
        "use_task_id": bool(num_tasks),
        "task_type_vocab_size": num_tasks or _DEFAULT_TASKS,
    }


FAMILY = replace(
    bert.FAMILY,
    name="ernie",
    model_types=("ernie",),
    architecture="ErnieModel",
    read_config=_read_config,
    write_config=_write_config,
    weights={**bert.WEIGHTS, "embeddings.task.weight": "embeddings.task_type_embeddings.weight"},
    prefixes=("ernie.", *COMMON_PREFIXES),
)
