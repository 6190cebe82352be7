"""A served model as tables of 80 columns."""

import itertools
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.table import Table

from attnlens.explanations import LOW_FAITHFULNESS
from attnlens.published import describe_comparison, describe_tokenizer
from attnlens_cli.printable import counted, printable, source_text
from attnlens_client import Faithfulness, Gate, ModelInfo, ParityFigure

_MAX_LABELS = 20


def model_table(model: ModelInfo, address: str) -> Table:
    """Return the properties of a model, its limits and its verdicts."""
    limits = model.limits
    verdict = "passed" if model.parity.passed else "FAILED"
    versions = sorted(model.versions.items(), key=lambda entry: (entry[0].startswith("export/"), entry[0]))
    rows = {
        "model": model.name,
        "version": model.version,
        "state": model.state,
        "source": source_text(model.source, model.source_revision),
        "license of the weights": model.weights_license or "not stated",
        "family": f"{model.family}, {'causal' if model.is_causal else 'bidirectional'}",
        "layers": _layer_lines(model),
        "hidden size": f"{model.hidden_size:,} (feed-forward {model.intermediate_size:,})",
        "vocabulary": f"{model.vocab_size:,}",
        "maximum tokens": f"{model.max_tokens:,} tokens (of {model.max_position_embeddings:,} positions)",
        **_result_rows(model),
        "prompts": _prompts_line(model),
        **_chat_template_row(model),
        **({"tokenizer": chosen} if (chosen := describe_tokenizer(model.tokenizer_choice)) else {}),
        "pairs of texts": "yes" if model.supports_text_pairs else "no",
        "explanations": ", ".join(model.explain_methods) or "none",
        **_faithfulness_row(model),
        "engine": _engine_line(model),
        "precision": _precision_line(model),
        "texts in a request": f"{limits.max_inputs_per_request:,}",
        "bytes in a text": f"{limits.max_text_bytes:,}",
        "bytes of text in a request": f"{limits.max_request_text_bytes:,}",
        "bytes in a request": f"{limits.max_request_bytes:,}",
        "bytes in a response": f"{limits.max_response_bytes:,}",
        "concurrent texts": f"{limits.max_concurrent_inputs:,}",
        "tokens in a batch": f"{limits.max_batch_tokens:,}",
        "attention queries in a request": f"{limits.max_attention_queries:,}",
        "parity with PyTorch": f"{verdict}, {model.parity.num_cases} input shapes",
        "the publisher's results": describe_comparison(model.publisher),
        **_long_context_row(model),
        **_engine_check_row(model),
        "versions": "\n".join(f"{name} {version}" for name, version in versions),
    }
    table = Table(title=address, title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, "\n".join(map(printable, value.split("\n"))))
    return table


def _faithfulness_row(model: ModelInfo) -> dict[str, str]:
    """Return a row with the measured rank correlation of each method, if there are any."""
    lines = [
        f"{measured.method} {measured.rank_correlation:.2f}{_interval(measured)}, "
        f"{counted(measured.num_texts, 'text')}"
        + (" (low)" if measured.rank_correlation < LOW_FAITHFULNESS else "")
        for measured in model.faithfulness
        if measured.method in model.explain_methods and measured.method != "leave_one_out"
    ]
    target = "the text's own embedding" if not model.labels else "the highest logit"
    heading = f"Spearman with leave-one-out, for {target}:"
    return {"faithfulness": "\n".join([heading, *lines])} if lines else {}


def _interval(measured: Faithfulness) -> str:
    if measured.interval_low is None or measured.interval_high is None:
        return ""
    return f" (95 % {measured.interval_low:.2f} to {measured.interval_high:.2f})"


def _engine_line(model: ModelInfo) -> str:
    device = ", ".join(model.execution_providers) or model.device
    return f"{model.engine} on {device}" if model.engine else device


def _long_context_row(model: ModelInfo) -> dict[str, str]:
    """Return a row about inputs that are too long for the parity grid, if there are any."""
    measured = model.parity.long_context
    if measured is None:
        return {}
    line = f"hidden states up to {measured.hidden_states_tokens:,} of {measured.max_tokens:,} tokens"
    if measured.probe_tokens and measured.hidden_states_tokens < measured.max_tokens:
        line += f", positions with one head up to {measured.probe_tokens:,}"
    return {"compared with PyTorch": line}


def _engine_check_row(model: ModelInfo) -> dict[str, str]:
    """Return a row for an engine other than ONNX Runtime, which parity covers."""
    check = model.engine_check
    if model.execution_providers or not model.engine:
        return {}
    label = f"{model.engine} with PyTorch"
    if check is None:
        return {label: f"not measured: attnlens check --engine {model.engine}"}
    verdict = "passed" if check.passed else "FAILED"
    measured = f"{check.num_cases} input shapes, {check.num_texts} texts"
    return {label: f"{verdict} in {check.precision}, {measured}, version {check.version}, {check.processor}"}


def _precision_line(model: ModelInfo) -> str:
    others = "token vectors and attention" if model.labels else "attention"
    return "fp32" if model.precision == "fp32" else f"{model.precision}, {others} in fp32"


def _result_rows(model: ModelInfo) -> dict[str, str]:
    """Return rows about the embeddings, or the labels of a classifier."""
    if not model.labels:
        return {
            "embedding size": f"{model.embedding_size:,}",
            "embeddings": _embedding_line(model),
            "similarity": "dot product" if model.similarity == "dot" else model.similarity,
        }
    kind = "reranker" if len(model.labels) == 1 else "classifier"
    names = ", ".join(model.labels[:_MAX_LABELS])
    more = f" and {len(model.labels) - _MAX_LABELS:,} more" if len(model.labels) > _MAX_LABELS else ""
    return {
        "kind": f"{kind}, scores are the {model.activation} of the logits",
        "labels": f"{len(model.labels):,}: {names}{more}",
    }


def _embedding_line(model: ModelInfo) -> str:
    steps = [f"{model.pooling} over the tokens" + (" without the prompt" if model.exclude_prompt else "")]
    for layer in model.dense:
        steps += ["length 1"] if layer.normalize_input else []
        bias = "" if layer.bias else ", no bias"
        steps.append(f"dense {layer.in_features} -> {layer.out_features} ({layer.activation}{bias})")
    steps += ["length 1"] if model.normalize else ["not normalized"]
    return "; ".join(steps)


def _prompts_line(model: ModelInfo) -> str:
    return (
        "\n".join(
            f"{name}: {text!r}" + (" (default)" if name == model.default_prompt_name else "")
            for name, text in sorted(model.prompts.items())
        )
        or "none"
    )


def _chat_template_row(model: ModelInfo) -> dict[str, str]:
    if model.chat_template is None:
        return {}
    before, after = model.chat_template
    return {"chat template": f"{before!r}, the text, {after!r}"}


def _layer_lines(model: ModelInfo) -> str:
    """Return one line per kind of layer."""
    if not model.layers:
        return f"{model.num_layers} x {model.num_heads} heads"
    lines = []
    for layer, count in Counter(model.layers).items():
        keys = layer.num_key_value_heads
        groups = f", {keys} for keys and values" if keys not in (0, layer.num_heads) else ""
        window = f", up to {layer.window_radius} positions away" if layer.window_radius else ""
        lines.append(
            f"{count} x {layer.num_heads} heads of {layer.head_size}{groups}, {layer.attention}{window}"
        )
    return "\n".join(lines)


def gates_table(gates: Sequence[Gate], title: str = "gates of parity") -> Table:
    """Return the gates of a bundle with their limits and measured values."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("graph and output", overflow="fold")
    table.add_column("gate", overflow="fold")
    for name in ("limit", "value"):
        table.add_column(name, justify="right", no_wrap=True, min_width=8)
    for graph, group in itertools.groupby(gates, key=lambda gate: gate.graph):
        table.add_row(printable(graph))
        for gate in group:
            kind = gate.kind.replace("_", " ") + (f", {gate.text_kind}" if gate.text_kind else "")
            numbers = (
                f"{number:.6f}" if "cosine" in gate.kind else f"{number:.1e}"
                for number in (gate.limit, gate.value)
            )
            table.add_row(f"  {printable(gate.role)}", printable(kind), *numbers)
    return table


def figures_table(figures: Sequence[ParityFigure]) -> Table:
    """Return the largest errors by graph and role."""
    table = Table(title="largest errors", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("graph and output", overflow="fold")
    for name, width in (("ONNX\n-torch", 7), ("ONNX\n-f64", 7), ("torch\n-f64", 7), ("min.\ncosine", 11)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    for graph, group in itertools.groupby(figures, key=lambda figure: figure.graph):
        table.add_row(printable(graph))
        for figure in group:
            table.add_row(
                f"  {printable(figure.role)}",
                f"{figure.max_abs_error:.1e}",
                f"{figure.max_abs_error_float64:.1e}",
                f"{figure.torch_max_abs_error_float64:.1e}",
                f"{figure.min_cosine:.9f}",
            )
    return table
