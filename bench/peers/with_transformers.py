"""Runs transformers with PyTorch, with batches sorted by length.

    python -m bench.peers.with_transformers CHECKPOINT (sdpa|eager|compiled) (fp32|bf16) THREADS MAX_TOKENS

`compiled` is `sdpa` compiled by Inductor for dynamic shapes, with frozen weights. With `side_by_side`,
several batches run concurrently and share the threads.
"""

import sys
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from bench.peers.timing import run_in_threads, serve_texts, sorted_batches

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Encoder:
    """A model and its tokenizer."""

    def __init__(
        self, checkpoint: str, implementation: str, precision: str, threads: int, max_tokens: int
    ) -> None:
        is_compiled = implementation == "compiled"
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._model = AutoModel.from_pretrained(
            checkpoint,
            attn_implementation="sdpa" if is_compiled else implementation,
            dtype=DTYPES[precision],
        ).eval()
        self._run = self._model
        if is_compiled:
            import torch._inductor.config as inductor  # noqa: PLC0415 - slow import

            inductor.freezing = True
            self._run = torch.compile(self._model, dynamic=True)
        self._threads = threads
        self._max_tokens = max_tokens

    def run(self, texts: list[str], what: str, batch_size: int, side_by_side: int = 1) -> list[Any]:
        """Return the results of `what` in text order."""
        results: list[Any] = [None] * len(texts)

        @torch.inference_mode()
        def work(batch: list[int]) -> None:
            inputs = self._tokenizer(
                [texts[index] for index in batch],
                padding=True,
                truncation=True,
                max_length=self._max_tokens,
                return_tensors="pt",
            )
            outputs = self._run(**inputs, output_attentions=what.startswith("attention"))
            for index, result in zip(batch, self._results(outputs, inputs, what), strict=True):
                results[index] = result

        def limit_threads() -> None:
            torch.set_num_threads(max(1, self._threads // side_by_side))

        batches = sorted_batches([len(text) for text in texts], batch_size)
        run_in_threads(work, batches, side_by_side, limit_threads)
        return results

    def _results(self, outputs: Any, inputs: Any, what: str) -> Any:  # noqa: ANN401 - untyped in transformers
        if what == "attention":
            layers = outputs.attentions  # each (B, H, T, T)
            if len(layers) != self._model.config.num_hidden_layers:
                raise RuntimeError(
                    f"{len(layers)} layers of attention instead of {self._model.config.num_hidden_layers}"
                )
            return zip(*(layer.numpy() for layer in layers), strict=True)
        if what == "attention mean":
            return outputs.attentions[-1].mean(dim=1).numpy()
        mask = inputs["attention_mask"][..., None]
        hidden = outputs.last_hidden_state.float()
        if what == "tokens":
            return hidden.numpy()
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(pooled).numpy()


if __name__ == "__main__":
    checkpoint, implementation, precision, threads, max_tokens = sys.argv[1:]
    encoder = Encoder(checkpoint, implementation, precision, int(threads), int(max_tokens))
    serve_texts(encoder.run, ["transformers", "torch"])
