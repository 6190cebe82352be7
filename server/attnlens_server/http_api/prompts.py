"""Selects one of a model's prompts by the purpose that other APIs call `input_type` or `task_type`."""

from collections.abc import Mapping
from itertools import chain

from attnlens_server.http_api.exchange import shown
from attnlens_server.http_api.json_bodies import invalid
from attnlens_server.operations.inputs import MAX_NAME_CHARS, MAX_NAMES, Prompt

_NAMES = {
    "query": ("query", "search_query", "retrieval_query", "retrieval.query"),
    "document": ("document", "passage", "search_document", "retrieval_document", "retrieval.passage"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}
"""Names that publishers and APIs use for the same purpose."""


class PromptChoice:
    """Prompts of one model by purpose.

    Args:
        prompts: Texts of the model's prompts by name.
    """

    def __init__(self, prompts: Mapping[str, str]) -> None:
        self._prompts = prompts

    def for_purpose(self, purpose: str | None, field: str) -> Prompt | None:
        """Return the prompt for a purpose, or None if the model has none for it.

        Args:
            purpose: Purpose, or the name of one of the model's prompts. If None, no prompt is selected.
            field: Field of the body with the purpose.

        Raises:
            BodyError: The purpose is unknown.
        """
        if purpose is None:
            return None
        names = next((names for names in _NAMES.values() if purpose in names), ())
        name = next((name for name in (purpose, *names) if name in self._prompts), None)
        if name is not None:
            return Prompt(name=name)
        if not names:
            known = list(dict.fromkeys((*chain.from_iterable(_NAMES.values()), *self._prompts)))
            listed = ", ".join(name[:MAX_NAME_CHARS] for name in known[: 2 * MAX_NAMES])
            raise invalid(field, f"is {shown(purpose)}: use one of {listed}")
        return None
