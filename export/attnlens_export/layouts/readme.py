"""README.md of a model repository: tokenization, pooling and prompts, which the server does not apply."""

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
    """Return the page in Markdown.

    Args:
        manifest: Manifest of the bundle.
        models: Models in the repository.
        start: Command that starts the server.
        tokenizer: File name of the tokenizer, or None if the bundle has none.
        is_linked: Whether files may be hard links to files of the bundle.
    """
    sizes = manifest.architecture
    pooling = Pooling.Name(manifest.pooling.pooling).removeprefix("POOLING_").lower()
    padding = sizes.pad_token_id
    excluded = " except those of the prompt" if manifest.pooling.exclude_prompt else ""
    dense = "".join(_describe_dense(layer) for layer in manifest.pooling.dense)
    scaled = ", normalized to unit length" if manifest.pooling.normalize else ""
    kept = manifest.pooling.truncate_dim
    scaled += f"; only its first {kept} components are used" if kept else ""
    details = excluded + dense + scaled
    described = "\n".join(_describe(model) for model in models)
    return f"""\
# {manifest.model_name}

Start the server in this directory:

    {start}

{described}

Clients send token ids. {_describe_tokenizer(tokenizer, manifest.max_tokens)}
Pad the shorter texts of a batch with id {padding}; `attention_mask` is 1 for a token, 0 for padding.
Requests with more than {sizes.max_position_embeddings} tokens fail in the server.

The embedding of a text is `last_hidden_state` after {pooling} pooling over its tokens{details}.
{_describe_prompts(manifest)}

`bundle.json` is the manifest of the original bundle.{_describe_links(is_linked=is_linked)}
"""


def _describe(model: ServedModel) -> str:
    outputs = [output.value.name for output in model.graph.outputs]
    names = outputs if len(outputs) < 3 else [outputs[0], f"{outputs[1]} ... {outputs[-1]}"]  # noqa: PLR2004
    inputs = ", ".join(f"`{value.name}`" for value in model.graph.inputs)
    return f"- `{model.name}`: {inputs} to {', '.join(f'`{name}`' for name in names)}"


def dense_file(layer: Dense) -> str:
    """Return the file name of the weights of a dense layer. A server would treat a directory as a model."""
    return f"{layer.path.replace('/', '_')}.safetensors"


def _describe_dense(layer: Dense) -> str:
    scaled = ", then normalized to unit length" if layer.normalize_input else ""
    bias = " + linear.bias" if layer.bias else ""
    activation = Activation.Name(layer.activation).removeprefix("ACTIVATION_").lower()
    return f"{scaled}, then {activation}(linear.weight x{bias}) with the weights of `{dense_file(layer)}`"


def _describe_prompts(manifest: Manifest) -> str:
    if manifest.HasField("chat_template"):
        frame = manifest.chat_template.without_prompt
        return (
            f"Insert each text between {frame.before_text!r} and {frame.after_text!r}, and tokenize it "
            "without special tokens. With a prompt, use `with_prompt` of `chat_template` in `bundle.json`."
        )
    if not manifest.prompts:
        return "Texts have no prompt."
    default = manifest.prompts[manifest.default_prompt_name] if manifest.default_prompt_name else ""
    described = f"The default prompt is {default!r}." if default else "By default, texts have no prompt."
    return f"Prepend one of `prompts` in `bundle.json` to each text. {described}"


def _describe_links(*, is_linked: bool) -> str:
    if not is_linked:
        return ""
    return " Files may be hard links to\nfiles of the bundle: replace them, but never modify them in place."


def _describe_tokenizer(tokenizer: str | None, max_tokens: int) -> str:
    if tokenizer is None:
        return "The bundle has no tokenizer."
    return f"`{tokenizer}` (Hugging Face tokenizers) computes them and truncates to {max_tokens}."
