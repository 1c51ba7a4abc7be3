"""Links from a page to a file outside docs/ lead to that file in the repository.

On a code host a relative link such as ``../loralib/layers.py`` works as it stands. A site holds the
pages alone, so that the link becomes one to ``repo_url``, or its text where there is no such URL.
"""

import logging
import os
import re
from pathlib import Path
from typing import Any

logger = logging.getLogger("mkdocs.hooks.code_links")

# [text](../file) and [text](../file#anchor), outside of fenced blocks.
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)\s]*)\)")
_FENCED = re.compile(r"^(```.*?^```)", re.M | re.S)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrites a page's links; called by mkdocs for each page.

    Args:
        markdown: the page.
        page: where it comes from.
        config: the site's settings, of which ``docs_dir`` and ``repo_url`` are read.

    Returns:
        The page with links that the site can follow. A link to a file that does not exist is left
        alone, with a warning, which is an error in a strict build.
    """
    docs = Path(config["docs_dir"]).resolve()
    folder = Path(page.file.abs_src_path).resolve().parent
    root, url = docs.parent, config["repo_url"]

    def rewritten(match: re.Match[str]) -> str:
        text, target = match.groups()
        name, _, anchor = target.partition("#")
        path = Path(os.path.normpath(folder / name))
        if path.is_relative_to(docs):
            return match[0]
        if not path.exists() or not path.is_relative_to(root):
            logger.warning("%s: links to %s, which does not exist", page.file.src_uri, target)
            return match[0]
        if not url:
            return text
        kind = "tree" if path.is_dir() else "blob"
        place = f"{url.rstrip('/')}/{kind}/main/{path.relative_to(root).as_posix()}"
        return f"[{text}]({place}{'#' if anchor else ''}{anchor})"

    parts = _FENCED.split(markdown)
    parts[::2] = [_LINK.sub(rewritten, part) for part in parts[::2]]
    return "".join(parts)
