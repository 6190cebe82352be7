"""docs/integrations.md lists the tested clients and their versions."""

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent
PACKAGES = {
    "with_chroma": ["chromadb"],
    "with_cohere": ["cohere"],
    "with_haystack": ["haystack-ai", "huggingface-api-haystack"],
    "with_haystack_rankers": ["cohere-haystack", "jina-haystack"],
    "with_huggingface_hub": ["huggingface_hub"],
    "with_infinity_client": ["infinity-client"],
    "with_lancedb": ["lancedb"],
    "with_langchain_cohere": ["langchain-cohere"],
    "with_langchain_openai": ["langchain-openai"],
    "with_litellm": ["litellm"],
    "with_llama_index_openai_like": ["llama-index-embeddings-openai-like"],
    "with_llama_index_rerank": [
        "llama-index-postprocessor-cohere-rerank",
        "llama-index-postprocessor-jinaai-rerank",
        "llama-index-postprocessor-tei-rerank",
    ],
    "with_llama_index_tei": ["llama-index-embeddings-text-embeddings-inference"],
    "with_ollama": ["ollama"],
    "with_openai": ["openai"],
    "with_voyageai": ["voyageai"],
}
"""Packages whose calls each module checks."""


def listed(source: str) -> dict[str, list[str]]:
    """Return the versions in the table of the page."""
    page = (TESTS.parent / "docs" / "integrations.md").read_text("utf-8").partition("## Tested clients")[2]
    rows = re.findall(rf"^\| {source} \| (\S+) ([\d., ]+) \| `", page, re.MULTILINE)
    return {name: versions.split(", ") for name, versions in rows}


def pinned(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==(\S+)$", path.read_text("utf-8"), re.MULTILINE))


def test_page_lists_the_tested_python_packages() -> None:
    assert sorted(PACKAGES) == sorted(path.stem for path in HERE.glob("with_*.py"))
    newest = pinned(TESTS / "integrations" / "requirements.txt")
    expected = {name: [newest[name]] for names in PACKAGES.values() for name in names}
    expected["openai"].append(pinned(HERE / "openai2.txt")["openai"])
    assert listed("PyPI") == expected


def test_page_lists_the_tested_npm_packages() -> None:
    versions = json.loads((TESTS / "node" / "package.json").read_text("utf-8"))["dependencies"]
    script = (TESTS / "node" / "http_clients.mjs").read_text("utf-8")
    imported = set(re.findall(r'^import .* from "([^"]+)";$', script, re.MULTILINE)) & versions.keys()
    assert listed("npm") == {name: [versions[name]] for name in imported - {"ai"}}
