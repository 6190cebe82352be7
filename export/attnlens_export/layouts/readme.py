"""The page in a model repository that says what a server can't: how text becomes ids, and tokens a vector."""

from collections.abc import Sequence

from attnlens.v1.manifest_pb2 import Activation, Dense, Manifest, Pooling
from attnlens_export.layouts.served_model import ServedModel


def readme(
    manifest: Manifest,
    models: Sequence[ServedModel],
    start: str,
    tokenizer: str | None,
    *,
    is_linked: bool = False,
) -> str:
    """Return a page of Markdown.

    Args:
        manifest: the bundle's.
        models: what the server offers.
        start: the command that starts the server.
        tokenizer: the file beside the page that turns texts into ids; None where the bundle has none.
        is_linked: whether files may be hard links to the bundle's.
    """
    sizes = manifest.architecture
    pooling = Pooling.Name(manifest.pooling.pooling).removeprefix("POOLING_").lower()
    padding = sizes.pad_token_id
    excluded = " without those of a prompt" if manifest.pooling.exclude_prompt else ""
    dense = "".join(_describe_dense(layer) for layer in manifest.pooling.dense)
    scaled = ", then scaled to length 1" if manifest.pooling.normalize else ""
    kept = manifest.pooling.truncate_dim
    scaled += f"; the first {kept} components of it are kept" if kept else ""
    described = "\n".join(_describe(model) for model in models)
    return f"""\
# {manifest.model_name}

Started in this directory:

    {start}

{described}

Clients send token ids. {_describe_tokenizer(tokenizer, manifest.max_tokens)}
Pad the shorter texts of a batch with id {padding}; `attention_mask` is 1 for a token, 0 for padding.
More than {sizes.max_position_embeddings} tokens fail inside the server.

The vector of a text is `last_hidden_state` after {pooling} pooling over its tokens{excluded}{dense}{scaled}.
{_describe_prompts(manifest)}

`bundle.json` is the manifest of the bundle that this was made from.{_describe_links(is_linked=is_linked)}
"""


def _describe(model: ServedModel) -> str:
    outputs = [output.value.name for output in model.graph.outputs]
    names = outputs if len(outputs) < 3 else [outputs[0], f"{outputs[1]} ... {outputs[-1]}"]  # noqa: PLR2004
    inputs = ", ".join(f"`{value.name}`" for value in model.graph.inputs)
    return f"- `{model.name}`: {inputs} to {', '.join(f'`{name}`' for name in names)}"


def dense_file(layer: Dense) -> str:
    """Return where the weights of a dense layer are: a directory there would be taken for a model."""
    return f"{layer.path.replace('/', '_')}.safetensors"


def _describe_dense(layer: Dense) -> str:
    scaled = ", then scaled to length 1" if layer.normalize_input else ""
    bias = " + linear.bias" if layer.bias else ""
    activation = Activation.Name(layer.activation).removeprefix("ACTIVATION_").lower()
    return f"{scaled}, then {activation}(linear.weight x{bias}) with the weights of `{dense_file(layer)}`"


def _describe_prompts(manifest: Manifest) -> str:
    if not manifest.prompts:
        return "No prompt goes before a text."
    default = manifest.prompts[manifest.default_prompt_name] if manifest.default_prompt_name else ""
    usual = f"{default!r} unless another is wanted" if default else "none unless one is wanted"
    return f"The prompt that goes before a text, {usual}, is one of `prompts` in `bundle.json`."


def _describe_links(*, is_linked: bool) -> str:
    if not is_linked:
        return ""
    return " Files may be hard links to the\nbundle's: replace them, never change them in place."


def _describe_tokenizer(tokenizer: str | None, max_tokens: int) -> str:
    if tokenizer is None:
        return "The bundle has no tokenizer."
    return f"`{tokenizer}` (Hugging Face tokenizers) makes them and cuts at {max_tokens}."
