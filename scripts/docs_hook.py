"""For mkdocs: makes links from a page to files outside `docs/` work on the site.

`[x](../benchmarks/records/y.jsonl)` becomes a link to a copy of that file; a link to a folder,
which a site cannot show, becomes its text. A missing target is left as it is: the
strict build reports it.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


def _target(page: str, link: str) -> str:
    """The repository path that a link on a page of `docs/` points to."""
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))


def _copy_name(path: str) -> str:
    return f"files/{path}.txt" if path.endswith((".md", ".py", ".jsonl")) else f"files/{path}"


def on_files(files: Any, config: Any) -> Any:
    found = set()
    for page in files.documentation_pages():
        text = page.content_string
        found |= {_target(page.src_uri, link) for _, link, _ in LINK.findall(text)}
    for path in sorted(found):
        if (ROOT / path).is_file():
            files.append(File.generated(config, _copy_name(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    def replaced(match: re.Match[str]) -> str:
        path = _target(page.file.src_uri, match[2])
        if (ROOT / path).is_dir():
            return match[1]
        if not (ROOT / path).is_file():
            return match[0]
        depth = page.file.src_uri.count("/")
        return f"[{match[1]}]({'../' * depth}{_copy_name(path)})"

    return LINK.sub(replaced, markdown)
