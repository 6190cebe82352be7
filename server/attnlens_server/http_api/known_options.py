"""Options of other servers that attnlens does not have, and the values for which it does the same.

A client that sets an option relies on it, so other values are rejected. Options that change a result here are
fields of the body types. Only keys that neither a body type nor its table contains are ignored.
"""

from collections.abc import Mapping
from typing import Any

Options = Mapping[str, tuple[Any, ...] | None]
"""Accepted values by name. None if the option cannot change a result, so that any value is accepted."""

_VLLM: Options = {
    "add_special_tokens": (True,),
    "cache_salt": None,
    "chat_template": (),
    "chat_template_kwargs": (),
    "messages": (),
    "mm_processor_kwargs": None,  # for images and audio
    "padding": ("do_not_pad",),
    "priority": None,
    "request_id": None,
    "user": None,
}
VLLM_SCORE = VLLM_CLASSIFY = _VLLM

OPENAI_EMBEDDINGS: Options = {
    **_VLLM,
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    # Voyage
    "output_dtype": ("float",),
    # Jina
    "late_chunking": (False,),
    "return_multivector": (False,),
    # Infinity
    "modality": ("text",),
}

RERANK: Options = {
    **_VLLM,
    "instruction": (),
    # Cohere
    "max_chunks_per_doc": (1,),
    "rank_fields": (["text"],),
    # Jina
    "return_embeddings": (False,),
}

COHERE_EMBED: Options = {"images": ([],), "inputs": (), "priority": None}
REPLACEMENTS = {"images": "texts", "inputs": "texts"}
"""Fields to send instead of an option."""
OLLAMA_EMBED: Options = {"keep_alive": None}
TEI_EMBED: Options = {"encoding_format": ("float",)}
TEI_EMBED_ALL: Options = {"dimensions": (), "encoding_format": ("float",), "normalize": (False,)}
