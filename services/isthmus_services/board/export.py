"""The board as one file that opens offline: the page, its scripts, and recorded answers to its requests."""

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from isthmus.errors import InputError, IsthmusError
from isthmus_services.board.api import Api
from isthmus_services.board.history import time_views
from isthmus_services.board.server import SCRIPTS, STATIC, STYLES

LISTEN_S = 3.0
"""How long to listen to the bus before writing [seconds]. Which learners are live is known only after a while."""

MOMENTS = 96
"""Number of past moments in the file."""

COMMITS = 300
"""Number of newest commits whose pages are in the file."""

LEARNERS = 24
"""Largest number of learners whose pages are in the file. With more, the past moments have no table of learners."""


async def write(path: Path, api: Api, progress: Callable[[float], None]) -> int:
    """Write the file, whole or not at all, and return its size [bytes]. Raises `InputError` if it cannot be written.

    If a question fails, the file holds the error as its answer.
    """
    return _put(path, _page(await _recorded(api, progress)))


def _put(path: Path, page: str) -> int:
    scratch = path.with_name(f".{path.name}.new")
    try:
        scratch.write_text(page, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise InputError(f"--export {path}: {error.strerror}") from None
    finally:
        scratch.unlink(missing_ok=True)
    return path.stat().st_size


def key_of(path: str, query: dict[str, Any]) -> str:
    """Return the key of an answer: the question as the page writes it."""
    told = {name: f"{v:.3f}".rstrip("0").rstrip(".") if isinstance(v, float) else v for name, v in query.items()}
    return path + (f"?{urlencode(told, quote_via=quote)}" if told else "")


async def _recorded(api: Api, progress: Callable[[float], None]) -> dict[str, Any]:
    """Return the answers by question, the recorded moments, the time of writing, and the number of commits."""
    c = api.feed.history
    begin, end = time_views.span(c, api.feed.wall)
    moments = [round(begin + (end - begin) * n / MOMENTS, 3) for n in range(1, MOMENTS + 1)]
    names = sorted(c.learners.known)
    few = len(names) <= LEARNERS
    todo: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in (
        "run", "state", "series", "measured", "ledger", "learners", "lanes", "fragments", "commits", "services",
    )]  # fmt: skip
    for at in moments:
        todo += [(name, {"at": at}) for name in ("state", "fragments", *(("learners",) if few else ()))]
    todo += [(f"learner/{name}", {}) for name in names[:LEARNERS]]
    todo += [(f"fragment/{p}", {}) for p in range(len(c.ends))]
    newest = range(len(c) - 1, max(-1, len(c) - 1 - COMMITS), -1)
    todo += [(f"commit/{int(c.rows['fragment'][n])}/{int(c.rows['version'][n])}", {}) for n in newest]
    answers = {}
    for number, (path, query) in enumerate(todo):
        try:
            answers[key_of(path, query)] = await api.answer(path, {k: [str(v)] for k, v in query.items()})
        except IsthmusError as error:
            answers[key_of(path, query)] = {"error": str(error)}
        progress((number + 1) / len(todo))
    return {"answers": answers, "moments": moments, "written_at": api.feed.wall, "commits": len(newest)}


def _page(recorded: dict[str, Any]) -> str:
    styles = [(STATIC / name).read_text(encoding="utf-8") for name in STYLES]
    scripts = [(STATIC / name).read_text(encoding="utf-8") for name in SCRIPTS]
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    # Text from the run must not end the script element that holds it, so every `<` is escaped.
    data = json.dumps(recorded, allow_nan=False).replace("<", "\\u003c")
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    head += "\n".join(f"<style>{style}</style>" for style in styles)
    body = f'<script type="application/json" id="recorded">{data}</script>\n'
    body += "\n".join(f"<script>{script}</script>" for script in scripts)
    return page.replace("<!-- styles -->", head).replace("<!-- scripts -->", body)


def _hashes(texts: list[str]) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
