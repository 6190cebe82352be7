"""Record a release: `python tests/compatibility/record.py 0.1`.

Exports two bundles, sends the requests to their servers, and writes all of it to `tests/compatibility/v0.1/`,
which is never changed afterwards.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import grpc

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

from compatibility import recording  # noqa: E402 - sys.path must be set first
from compatibility.cases import MODELS  # noqa: E402
from odd_models import OddModel  # noqa: E402
from served import ServerProcess  # noqa: E402
from small_bundles import TOKENIZERS, export_classifier  # noqa: E402

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 40,
}


def make_bundle(directory: Path) -> None:
    """Export a BERT with unusual sizes that uses every bundle feature: fp16, dense layers and prompts."""
    import torch  # noqa: PLC0415 - slow import
    from safetensors.torch import save_file  # noqa: PLC0415 - slow import

    from attnlens_export import ExportOptions, Fp16, export_bundle  # noqa: PLC0415 - slow import

    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary)
        OddModel("Bert", SIZES).make().save_pretrained(source)
        (source / "vocab.txt").write_bytes((TOKENIZERS / "wordpiece" / "vocab.txt").read_bytes())
        for name, content in {
            "tokenizer_config.json": {"model_max_length": 40, "tokenizer_class": "BertTokenizer"},
            "modules.json": [
                {
                    "idx": index,
                    "name": str(index),
                    "path": path,
                    "type": f"sentence_transformers.models.{kind}",
                }
                for index, (path, kind) in enumerate(
                    [
                        ("", "Transformer"),
                        ("1_Pooling", "Pooling"),
                        ("2_Dense", "Dense"),
                        ("3_Normalize", "Normalize"),
                    ]
                )
            ],
            "1_Pooling/config.json": {"word_embedding_dimension": 24, "pooling_mode_mean_tokens": True},
            "2_Dense/config.json": {
                "in_features": 24,
                "out_features": 10,
                "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh",
            },
        }.items():
            (source / name).parent.mkdir(exist_ok=True)
            (source / name).write_text(json.dumps(content), encoding="utf-8")
        generator = torch.Generator().manual_seed(1)
        weights = {
            "linear.weight": torch.randn(10, 24, generator=generator) / 5,
            "linear.bias": torch.randn(10, generator=generator),
        }
        save_file(weights, source / "2_Dense" / "model.safetensors")
        options = ExportOptions(
            name="small",
            precisions=(Fp16(),),
            prompts={"query": "find: ", "passage": "the "},
            default_prompt="passage",
        )
        export_bundle(source, directory, options)


def record_release(directory: Path) -> None:
    """Write bundles of this version and their recorded calls to the new directory `directory`."""
    make_bundle(directory / "embedder" / "bundle")
    export_classifier("reranker", directory / "reranker")
    shutil.rmtree(directory / "reranker" / "source")
    for model, cases in MODELS.items():
        with (
            ServerProcess(directory / model / "bundle") as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            calls = [
                recording.call(channel, name, method, request.SerializeToString())
                for name, (method, request) in cases.items()
            ]
        recording.write(directory / model / "calls.json", calls)


if __name__ == "__main__":
    record_release(HERE / f"v{sys.argv[1]}")
