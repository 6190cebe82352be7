"""Tokenization of inputs, and mapping of tokens to their spans in the texts.

`inputs` encodes the inputs of a request, `tokenizer` wraps the bundle's tokenizer, `tokens` describes tokens.
"""

from attnlens_server.text.inputs import Input, InputEncoder, TextPair, TokenIds, portions
from attnlens_server.text.tokenizer import TextEncoder, UntokenizableError
from attnlens_server.text.tokens import EncodedInput, Tokens, TokenSource

__all__ = [
    "EncodedInput",
    "Input",
    "InputEncoder",
    "TextEncoder",
    "TextPair",
    "TokenIds",
    "TokenSource",
    "Tokens",
    "UntokenizableError",
    "portions",
]
