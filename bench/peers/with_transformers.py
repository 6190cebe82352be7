"""Runs transformers with PyTorch, with batches sorted by length.

python -m bench.peers.with_transformers CHECKPOINT (sdpa|eager) THREADS MAX_TOKENS
"""

import sys
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from bench.peers.timing import serve_texts, sorted_batches


class Encoder:
    """A model and its tokenizer."""

    def __init__(self, checkpoint: str, implementation: str, max_tokens: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._model = AutoModel.from_pretrained(checkpoint, attn_implementation=implementation).eval()
        self._max_tokens = max_tokens

    @torch.inference_mode()
    def run(self, texts: list[str], what: str, batch_size: int) -> list[Any]:
        """Return the results of `what` in text order."""
        results: list[Any] = [None] * len(texts)
        for batch in sorted_batches([len(text) for text in texts], batch_size):
            inputs = self._tokenizer(
                [texts[index] for index in batch],
                padding=True,
                truncation=True,
                max_length=self._max_tokens,
                return_tensors="pt",
            )
            outputs = self._model(**inputs, output_attentions=what.startswith("attention"))
            for index, result in zip(batch, self._results(outputs, inputs, what), strict=True):
                results[index] = result
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
        if what == "tokens":
            return outputs.last_hidden_state.numpy()
        pooled = (outputs.last_hidden_state * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(pooled).numpy()


if __name__ == "__main__":
    checkpoint, implementation, threads, max_tokens = sys.argv[1:]
    torch.set_num_threads(int(threads))
    encoder = Encoder(checkpoint, implementation, int(max_tokens))
    serve_texts(encoder.run, ["transformers", "torch"])
