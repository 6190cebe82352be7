"""Texts to token ids, and tokens back to places in the texts.

`inputs` is what comes in and what becomes of it, `tokenizer` the bundle's tokenizer, `tokens` what is told of
tokens, and `places` where they stand.
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
