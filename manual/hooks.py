"""The hooks of `make docs`: pages from the code and from outside docs/, diagrams, and checks.

A link of the repository that leaves docs/ leads to a page of the site: to a document that the site
has too, or to a page with the text of that file. So the site is whole without the repository, and
MkDocs checks these links with the others. A page that would load a script, a style, a font or a
picture from another site fails the build.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

from commands import commands  # noqa: E402 - of this folder
from pages import API, COMMANDS, MODULES, page_of, pages  # noqa: E402

# Documents outside docs/ that are pages of the site, by their place in it.
DOCUMENTS = {
    "README.md": "about.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "CODE_OF_CONDUCT.md": "project/code-of-conduct.md",
    "examples/README.md": "examples/index.md",
    "examples/imagenet/README.md": "examples/imagenet.md",
    "examples/kubernetes/README.md": "examples/kubernetes.md",
}
DECISIONS = "decisions"
_PLACES = {place: source for source, place in DOCUMENTS.items()}
_FENCE = re.compile(r"^( *)(```+).*?^\1\2`*$", re.MULTILINE | re.DOTALL)
# Of the words that name a block's language, tests read all, and the site's Markdown the first.
_MORE_WORDS = re.compile(r"^( *```+\w+) .*$", re.MULTILINE)
_LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)\s#]+)((?:#[^)\s]*)?\))")
_NAMED = re.compile(r"\bdocs/([\w/-]+\.md)\b(?![^<]*</a>)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml", ".sh": "bash"}
_LOADED = re.compile(
    r"<(?:script|img|iframe|source|audio|video)\b[^>]*?\bsrc=[\"']?(?:https?:)?//[^\s>]*"
    r"|<link\b[^>]*\brel=[\"']?(?:stylesheet|preconnect|preload|icon)[^>]*?\bhref=[\"']?"
    r"(?:https?:)?//[^\s>]*"
    r"|@import\s+[^;]*//[^;]*|url\(\s*[\"']?(?:https?:)?//[^)]*"
)
# How many lines of another file a page shows; past that the file is for programs.
_SHOWN_LINES_MAX = 2000
_DIAGRAM = 'class="mermaid"'
_SCRIPT = "assets/mermaid.min.js"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the generated pages into the navigation, where it names their folders."""
    listed: dict[str, Any] = {
        DECISIONS: [f"{DECISIONS}/{name}" for name in ("README.md", *decisions())],
        COMMANDS: [f"{COMMANDS}/index.md", *({c.name: page_of(c)} for c in commands())],
        API: [f"{API}/index.md", *({name: f"{API}/{name}.md"} for name in MODULES)],
    }
    config.nav = _filled(config.nav, listed)
    return config


def decisions() -> list[str]:
    """Return the pages of decisions in the order in which their list has them."""
    text = (ROOT / "docs" / DECISIONS / "README.md").read_text("utf-8")
    return re.findall(r"^- \[.*\]\(([\w-]+\.md)\)", text, re.MULTILINE)


def _filled(nav: Any, listed: dict[str, Any]) -> Any:
    if isinstance(nav, list):
        return [_filled(item, listed) for item in nav]
    if isinstance(nav, dict):
        return {title: _filled(item, listed) for title, item in nav.items()}
    return listed.get(nav, nav)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for place, text in pages().items():
        files.append(File.generated(config, place, content=text))
    for source, place in DOCUMENTS.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text("utf-8")))
    texts = {
        source: (ROOT / source).read_text("utf-8")
        for source in [*DOCUMENTS, *(f"docs/{f.src_uri}" for f in files.documentation_pages())]
        if (ROOT / source).is_file()
    }
    for source, text in texts.items():
        for target in _targets(source, text):
            place = _shown_at(target)
            if place and files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, content=_page_of_file(target)))
    style = (HERE / "site.css").read_text("utf-8")
    files.append(File.generated(config, "site.css", content=style))
    mermaid = (ROOT / "build" / "mermaid" / "mermaid.min.js").read_bytes()
    files.append(File.generated(config, _SCRIPT, content=mermaid))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    here = page.file.src_uri
    source = _PLACES.get(here, f"docs/{here}")
    if not (ROOT / source).is_file():
        return markdown

    def turned(found: re.Match[str]) -> str:
        place = _place_of(_resolved(source, found[2]))
        if place is None:
            return found[0]
        return found[1] + posixpath.relpath(place, posixpath.dirname(here) or ".") + found[3]

    return _outside_fences(markdown, lambda text: _LINK.sub(turned, text))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link the documents that docstrings and helps of options name, such as docs/settings.md."""
    if not page.file.src_uri.startswith("reference/"):
        return html

    def linked(found: re.Match[str]) -> str:
        named = files.get_file_from_path(found[1])
        if named is None:
            raise PluginError(f"{page.file.src_uri} names {found[0]}, which is not there")
        return f'<a href="{named.url_relative_to(page.file)}">{found[0]}</a>'

    return _NAMED.sub(linked, html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Give pages with diagrams their script, and refuse what is loaded from another site."""
    if loaded := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another site: {loaded[0]}")
    if _DIAGRAM not in output:
        return output
    path = posixpath.relpath(_SCRIPT, posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace("<script", f'<script src="{path}"></script>\n<script', 1)


def _targets(source: str, text: str) -> list[str]:
    found: list[str] = []
    _outside_fences(text, lambda part: found.extend(m[2] for m in _LINK.finditer(part)) or part)
    return [_resolved(source, target) for target in found]


def _outside_fences(text: str, change: Any) -> str:
    parts, last = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[last : fence.start()]), _MORE_WORDS.sub(r"\1", fence[0], count=1)]
        last = fence.end()
    return "".join([*parts, change(text[last:])])


def _resolved(source: str, target: str) -> str:
    """Return the path in the repository that a link of a file leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _place_of(path: str) -> str | None:
    """Return the page of a path in the repository; None where it has none."""
    if path in DOCUMENTS:
        return DOCUMENTS[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else _shown_at(path)


def _shown_at(path: str) -> str | None:
    """Return the place of a page that shows a file which is no document of the site."""
    if path in DOCUMENTS or path.startswith("docs/") or not (ROOT / path).is_file():
        return None
    return f"files/{path}.md"


def _page_of_file(path: str) -> str:
    text = (ROOT / path).read_text("utf-8")
    lines = text.splitlines()
    if len(lines) > _SHOWN_LINES_MAX:
        text = "\n".join([*lines[:_SHOWN_LINES_MAX], f"... {len(lines)} lines in all"])
    fence = "`" * (3 + max(map(len, re.findall(r"`{3,}", text)), default=0))
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"
