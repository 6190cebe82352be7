"""Embeddings of the rows of a Ray dataset."""

import os
from typing import Any, Literal, Unpack

import pyarrow as pa
from ray.data import ActorPoolStrategy, Dataset

from attnlens_server.in_process import local
from attnlens_server.in_process.local_model import LocalSettings


class Embedder:
    """Callable class for `Dataset.map_batches` with `batch_format="pyarrow"`. Each actor opens one model.

    It appends a column with the vectors of the texts in another column, and keeps all rows and their order. A
    missing text gets a missing vector, since an empty text has a vector, too. Results depend only on the texts,
    so a batch that runs again after a failure has the same vectors.

    Args:
        bundle: Bundle directory. It must exist on every node.
        column: Name of the column with the texts.
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
        """Return the batch with the vectors of its texts.

        Raises:
            TypeError, ValueError, AttnlensError: See `Client.embed`.
        """
        texts = batch.column(self._column).combine_chunks()
        vectors = self._model.embed(texts.drop_null(), **self._options)
        values = pa.array(vectors.reshape(-1))
        column = pa.FixedSizeListArray.from_arrays(values, vectors.shape[1])
        if texts.null_count:
            indices = pa.compute.cumulative_sum(texts.is_valid().cast("int32"))
            column = column.take(pa.compute.if_else(texts.is_valid(), pa.compute.subtract(indices, 1), None))
        return batch.append_column(self._output, column)


def embed(
    dataset: Dataset,
    bundle: str | os.PathLike[str],
    *,
    column: str = "text",
    output: str = "embedding",
    workers: int | tuple[int, int] = 1,
    num_cpus: int = 1,
    batch_size: int = 512,
    truncate: bool = False,
    dtype: Literal["float32", "float16"] = "float32",
    prompt_name: str | None = None,
    **settings: Unpack[LocalSettings],
) -> Dataset:
    """Append the vectors of a column of texts to a dataset.

    Each worker is an actor with its own model. Ray runs the batches of a failed worker again. To write each row
    exactly once, write the result with `write_parquet(path, mode="overwrite")`: a task that runs again replaces
    its file, and a job that runs again replaces the directory.

    Args:
        dataset: Dataset with a column of texts.
        bundle: Bundle directory. It must exist on every node.
        column: Name of the column with the texts. A missing text gets a missing vector.
        output: Name of the new column, a fixed-size list.
        workers: Number of workers, or their minimum and maximum.
        num_cpus: Number of CPUs that Ray reserves per worker, and of threads per model.
        batch_size: Number of texts per batch.
        truncate: Whether to truncate long texts instead of raising InputTooLongError.
        dtype: Data type of the vectors.
        prompt_name: See `Client.embed`.
        settings: Arguments of `attnlens_server.local`, such as `precision`.

    >>> rows = embed(ray.data.read_parquet("texts"), "bundles/minilm", workers=4)
    >>> rows.write_parquet("vectors", mode="overwrite", compression="zstd")
    """
    low, high = workers if isinstance(workers, tuple) else (workers, workers)
    settings.setdefault("threads", num_cpus)
    options = {"truncate": truncate, "dtype": dtype, "prompt_name": prompt_name}
    return dataset.map_batches(
        Embedder,
        fn_constructor_args=(os.fspath(bundle), column, output, options),
        fn_constructor_kwargs=dict(settings),
        batch_format="pyarrow",
        batch_size=batch_size,
        compute=ActorPoolStrategy(min_size=low, max_size=high),
        num_cpus=num_cpus,
        udf_modifying_row_count=False,
    )
