"""Selects one of a model's prompts by the purpose that other APIs call `input_type` or `task_type`."""

from collections.abc import Mapping

from attnlens_server.serving.requests import Prompt

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

    def for_purpose(self, purpose: str) -> Prompt | None:
        """Return the prompt for a purpose, or None if the model has no prompts, or none for a known purpose.

        An unknown purpose is returned as a name, so that the validation rejects it.
        """
        if not self._prompts:
            return None
        names = next((names for names in _NAMES.values() if purpose in names), (purpose,))
        name = next((name for name in (purpose, *names) if name in self._prompts), None)
        if name is not None:
            return Prompt(name=name)
        return None if len(names) > 1 else Prompt(name=purpose)
