"""Embeddings of the rows of a Ray dataset."""

import os
from typing import Any, Literal, Unpack

import pyarrow as pa
import pyarrow.compute as pc
from ray.data import ActorPoolStrategy, Dataset

from attnlens_server.in_process import local
from attnlens_server.in_process.local_model import LocalSettings


class Embedder:
    """Callable class for `Dataset.map_batches` with `batch_format="pyarrow"`. Each actor opens one model.

    It appends a column with the vectors of a text column. A missing text gets a missing vector.

    Args:
        bundle: Bundle directory.
        column: Name of the text column.
        output: Name of the new column.
        options: Arguments of `Client.embed`, such as `truncate` and `prompt_name`.
        settings: Arguments of `attnlens_server.local`, such as `threads` and `precision`.

    Raises:
        ConfigError, StartupError: See `attnlens_server.local`.
    """

    def __init__(
        self,
        bundle: str | os.PathLike[str],
        column: str,
        output: str,
        options: dict[str, Any],
        **settings: Unpack[LocalSettings],
    ) -> None:
        self._model = local(bundle, **settings)
        self._column, self._output, self._options = column, output, options

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Return a batch with the additional column.

        Raises:
            TypeError, ValueError, AttnlensError: See `Client.embed`.
        """
        texts = batch.column(self._column).combine_chunks()
        present = texts.is_valid()
        vectors = self._model.embed(texts.filter(present), **self._options)
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
        if texts.null_count:
            row = pc.subtract(pc.cumulative_sum(present.cast("int64")), 1)
            column = column.take(pc.if_else(present, row, None))
        return batch.append_column(self._output, column)


def embed(
    dataset: Dataset,
    bundle: str | os.PathLike[str],
    *,
    column: str = "text",
    output: str = "embedding",
    workers: int | tuple[int, int] = 1,
    num_cpus: int = 1,
    rows_per_task: int = 4096,
    truncate: bool = False,
    dtype: Literal["float32", "float16"] = "float32",
    prompt_name: str | None = None,
    **settings: Unpack[LocalSettings],
) -> Dataset:
    """Append the vectors of a text column to a dataset.

    Each worker is an actor with its own model. If it dies, Ray starts another one and repeats its tasks.
    Leave at least one CPU of the cluster to the tasks that read and write, or the job waits forever.

    `write_parquet` writes each row exactly once: a repeated task replaces its file. With
    `SaveMode.OVERWRITE`, a repeated job replaces all files. Rows are in no particular order.

    Args:
        dataset: Dataset with a text column.
        bundle: Bundle directory. It must exist on all nodes.
        column: Name of the text column. A missing text gets a missing vector.
        output: Name of the new column, which contains fixed-size lists.
        workers: Number of workers, or their minimum and maximum.
        num_cpus: Number of CPUs that Ray reserves for a worker, and of threads of its model.
        rows_per_task: Number of rows per task, and per file that `write_parquet` writes by default.
        truncate: Whether to truncate long texts instead of raising InputTooLongError.
        dtype: Data type of the vectors.
        prompt_name: Name of one of the model's prompts. If None, the default prompt.
        settings: Arguments of `attnlens_server.local`, such as `precision`.

    >>> vectors = embed(ray.data.read_parquet("texts"), "bundles/minilm", workers=4)
    >>> vectors.write_parquet("vectors", mode=SaveMode.OVERWRITE)
    """
    low, high = workers if isinstance(workers, tuple) else (workers, workers)
    settings.setdefault("threads", num_cpus)
    options = {"truncate": truncate, "dtype": dtype, "prompt_name": prompt_name}
    # The block of a reader may contain a million texts, which would be a single task.
    return dataset.repartition(target_num_rows_per_block=rows_per_task).map_batches(
        Embedder,
        fn_constructor_args=(os.fspath(bundle), column, output, options),
        fn_constructor_kwargs=dict(settings),
        batch_format="pyarrow",
        batch_size=rows_per_task,
        compute=ActorPoolStrategy(min_size=low, max_size=high),
        num_cpus=num_cpus,
        udf_modifying_row_count=False,
    )
