"""Tokenization of inputs, and mapping of tokens to their spans in the texts.

`inputs` encodes the inputs of a request, `pairs` queries with their documents, `tokenizer` wraps the bundle's
tokenizer, `tokens` describes tokens.
"""

from attnlens_server.text.inputs import Input, InputEncoder, TextPair, TokenIds, portions
from attnlens_server.text.pairs import EncodedPair, PairEncoder, parts_of
from attnlens_server.text.tokenizer import TextEncoder, UntokenizableError
from attnlens_server.text.tokens import EncodedInput, TextShape, Tokens, TokenSource

__all__ = [
    "EncodedInput",
    "EncodedPair",
    "Input",
    "InputEncoder",
    "PairEncoder",
    "TextEncoder",
    "TextPair",
    "TextShape",
    "TokenIds",
    "TokenSource",
    "Tokens",
    "UntokenizableError",
    "parts_of",
    "portions",
]
