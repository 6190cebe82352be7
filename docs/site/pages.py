"""Pages of the documentation site: a hook of mkdocs (`make docs-site`).

The pages are the Markdown files of the repository, at the same paths, so that relative links work on the site
and on a code host. The hook adds:

- the navigation, from the list of pages in docs/README.md;
- a page for every other file that a page links to, with its text;
- the reference: a page for each package, from its docstrings, and a page for the protocol, from the .proto
  files.
"""

import ast
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import protocol  # docs/site/protocol.py

ROOT = Path(__file__).parents[2]
HOME, INDEX = "README.md", "docs/README.md"
ASSETS = ("docs/site/site.css", "docs/site/iframe-worker.js")
PROTOCOL = "docs/reference/protocol.md"
# Directory and purpose of each package.
PACKAGES = {
    "attnlens_client": ("client", "send requests from Python"),
    "attnlens_bulk": ("bulk", "embed files of any size"),
    "attnlens_ray": ("bulk", "use a Ray cluster"),
    "attnlens_server": ("server", "configure a server"),
    "attnlens_export": ("export", "export and check bundles"),
    "attnlens_model": ("model", "the encoder in PyTorch"),
    "attnlens.reductions": ("protos", "reductions of attention weights"),
    "attnlens.explanations": ("protos", "formulas of explanations"),
    "attnlens.patterns": ("protos", "sparse attention patterns"),
    "attnlens_analysis.heads": ("analysis", "measure the function of each head"),
    "attnlens_analysis.teach": ("analysis", "follow one token through one head"),
    "attnlens_analysis.profile": ("analysis", "profile the run time"),
    "attnlens_viewer": ("viewer", "create pages with results"),
}
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".proto": "protobuf", ".toml": "toml", ".json": "json", ".yaml": "yaml"}


def on_config(config: MkDocsConfig) -> None:
    """Derive the navigation from the index: headings are sections, links in lists are pages."""
    navigation: list[Any] = [{"Home": HOME}]
    for section in re.split(r"^## ", (ROOT / INDEX).read_text("utf-8"), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        links = re.findall(r"^- \[[^]]*\]\(([^)#]+)\)", text, re.MULTILINE)
        if links:
            navigation.append({title: [_from_root(INDEX, link) for link in links]})
    navigation.insert(1, {"All pages": INDEX})
    navigation.append({"Reference": [*(_reference(name) for name in PACKAGES), PROTOCOL]})
    config.nav = navigation


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the theme, the pages, the files that they link to, and the reference pages."""
    theme_files = [file for file in files if file.src_dir != config.docs_dir]
    pages = [HOME, *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md")))]
    linked = {target for page in pages for target in _targets(page)}
    pages += sorted(target for target in linked if target.endswith(".md") and target not in pages)
    ours = [_file(page, config) for page in [*pages, *ASSETS]]
    others = {target for page in pages for target in _targets(page)} - set(pages)
    folders = {target for target in others if (ROOT / target).is_dir()}
    ours += [File.generated(config, f"{name}/index.md", content=_folder(name)) for name in sorted(folders)]
    for target in sorted((others - folders).union(*map(_files_in, folders))):
        if Path(target).suffix in {".png", ".svg"}:
            ours.append(_file(target, config))
        else:
            ours.append(File.generated(config, _as_page(target), content=_source(target)))
    for name, (folder, what) in PACKAGES.items():
        content = _package(name, folder, what)
        ours.append(File.generated(config, _reference(name), content=content))
    ours.append(File.generated(config, PROTOCOL, content=protocol.reference(ROOT / "protos")))
    return Files([*theme_files, *ours])


def on_page_markdown(markdown: str, page: Page, **_others: object) -> str:
    """Replace links to files of the repository by links to their pages."""

    def to_page(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        place = (ROOT / page.file.src_uri).parent / target
        if place.is_dir():
            return f"]({target.rstrip('/')}/index.md)"
        keeps = target.endswith((".md", ".png", ".svg")) or not place.is_file()
        return link[0] if keeps else f"]({_as_page(target)}{anchor})"

    return LINK.sub(to_page, markdown)


def _file(src_uri: str, config: MkDocsConfig) -> File:
    return File(src_uri, str(ROOT), config.site_dir, use_directory_urls=False)


def _from_root(page: str, link: str) -> str:
    """Return the target of a link relative to the root."""
    return str((ROOT / page).parent.joinpath(link).resolve().relative_to(ROOT))


def _targets(page: str) -> set[str]:
    """Return the files that a page links to, relative to the root."""
    text = (ROOT / page).read_text("utf-8")
    return {_from_root(page, target) for target, _anchor in LINK.findall(text)}


def _as_page(target: str) -> str:
    return f"{target}.md"


def _source(target: str) -> str:
    path = ROOT / target
    lines = ["---", "search: {exclude: true}", "---", f"# {path.name}", "", f"`{target}`", ""]
    lines += [f"````{LANGUAGES.get(path.suffix, 'text')}", path.read_text("utf-8"), "````"]
    return "\n".join(lines)


def _folder(target: str) -> str:
    """Return the page for a directory that a page links to."""
    names = [Path(file).name for file in _files_in(target)]
    return "\n".join([f"# {target}", "", *(f"- [{name}]({_as_page(name)})" for name in names)])


def _files_in(target: str) -> list[str]:
    """Return the source files in a directory, relative to the root."""
    files = sorted(path for path in (ROOT / target).iterdir() if path.suffix in LANGUAGES)
    return [str(path.relative_to(ROOT)) for path in files if "_pb2" not in path.name]


def _reference(name: str) -> str:
    return f"docs/reference/{name}.md"


def _package(name: str, folder: str, what: str) -> str:
    """Return the page of a package or module: its docstring and its public names."""
    path = ROOT / folder / name.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text("utf-8"))
    lines = (ast.get_docstring(tree) or "").partition("\n")
    entries = "\n".join(f"::: {name}.{public}\n" for public in _public_names(tree))
    return f"# {name}\n\n{what[0].upper()}{what[1:]}. {lines[0]}\n{lines[2]}\n\n{entries}"


def _public_names(tree: ast.Module) -> list[str]:
    """Return the names in `__all__`. If there is none, the public classes and functions of the module."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.casefold)
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [name for name in defined if not name.startswith("_")]
