"""`GET /`: a page to chat with the server, one static file (page.html).

Its policy lets the browser run that file's own script and style, by their hashes, and ask this
server; nothing else. Knows no protocol: the page itself speaks OpenAI's.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from starlette.responses import HTMLResponse
from starlette.types import ASGIApp

from edgespec.serve.service import Call

PAGE = "page.html"


@cache
def page() -> tuple[str, str]:
    """The page and its Content-Security-Policy (W3C CSP Level 3)."""
    text = resources.files(__package__).joinpath(PAGE).read_text(encoding="utf-8")
    sources = {tag: hash_of(text, tag) for tag in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']};"
        " connect-src 'self'; img-src data:; form-action 'none'; base-uri 'none';"
        " frame-ancestors 'none'"
    )
    return text, policy


def hash_of(text: str, tag: str) -> str:
    """The source expression of the one block between the tags."""
    (block,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
    return f"'sha256-{digest}'"


async def answer(call: Call) -> ASGIApp:
    """The page."""
    text, policy = page()
    headers = {"content-security-policy": policy, "referrer-policy": "no-referrer"}
    return HTMLResponse(text, headers=headers)
