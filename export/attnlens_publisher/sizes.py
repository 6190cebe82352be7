"""The size of an encoder of transformers, which its `config.json` determines."""

from typing import Any

from attnlens_publisher.process import Report


def count_parameters(report: Report, *, source: str) -> int:
    """Return the number of parameters that `config.json` describes, without allocating any.

    Args:
        report: Not called.
        source: Checkpoint directory.
    """
    del report
    import torch  # noqa: PLC0415 - the process has imported it
    import transformers  # noqa: PLC0415

    automatic: Any = transformers.AutoModel
    with torch.device("meta"):
        model = automatic.from_config(transformers.AutoConfig.from_pretrained(source))
    return sum(parameter.numel() for parameter in model.parameters())
