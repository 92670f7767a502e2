"""The board over HTTP: pages, the API, and a stream of changes. It only answers, and changes nothing.

Everything that comes from a run is data: the server builds no page from it, and the pages insert it as text, never as
markup.
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from isthmus.errors import Denied, InputError, IsthmusError, LogCorrupt, Unavailable
from isthmus_services.board.api import Api, Unknown
from isthmus_services.board.feed import Feed

logger = logging.getLogger("isthmus.services.board")

STATIC = Path(__file__).with_name("static")

SCRIPTS = (
    "vendor/htm-preact.umd.js", "vendor/uPlot.iife.min.js", "words.js", "api.js", "charts.js", "parts.js", "lanes.js",
    "rounds.js", "pages.js", "board.js",
)  # fmt: skip
"""In the order in which they are loaded."""

STYLES = ("vendor/uPlot.min.css", "board.css")

POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}

HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

COOKIE = "isthmus-board"

QUIET_S = 15.0
"""Interval at which a stream without changes sends a comment, so that proxies keep it open [seconds]."""

CLOSE_S = 1.0

_HOST = re.compile(r"(?:(?P<name>[^\[\]:@/]+)|\[(?P<address>[0-9a-fA-F:.]+)\])(?::\d+)?")

_API = web.AppKey("api", Api)
_FEED = web.AppKey("feed", Feed)
_STREAMS: web.AppKey[Any] = web.AppKey("streams")
"""The set of tasks that serve the open streams."""


def address_of(text: str) -> tuple[str, int]:
    """Return the host and port of a text HOST:PORT. Raises `InputError` for any other text."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InputError(f"--http {text}: write it as HOST:PORT, such as 127.0.0.1:8470 (port 0: any that is free)")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def application(feed: Feed, api: Api, token: str | None) -> web.Application:
    """Return the web application.

    `token`: the secret that a request must carry. None: a request needs none, but must ask for a loopback host.
    """
    # Cookies ignore ports, so the name tells the cookies of two boards on one host apart.
    app = web.Application(middlewares=[_guard(token, f"{COOKIE}-{feed.log.run.digest[:4].hex()}"), _errors])
    app[_API], app[_FEED], app[_STREAMS] = api, feed, set()
    app.router.add_get("/api/events", _events)
    app.router.add_get("/api/{path:.+}", _answer)
    app.router.add_get("/static/{path:.+}", _static)
    app.router.add_get("/{path:.*}", _page)
    app.on_shutdown.append(_close_streams)
    return app


@asynccontextmanager
async def served(feed: Feed, api: Api, address: str, token: str | None) -> AsyncIterator[str]:
    """Serve while the body runs; yield the URL, with the token. Raises `InputError` if the address cannot be used."""
    host, port = address_of(address)
    runner = web.AppRunner(application(feed, api, token), access_log=None, shutdown_timeout=CLOSE_S)
    await runner.setup()
    try:
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
        except OSError as error:
            raise InputError(
                f"--http {address}: {error.strerror or error}: choose another address; port 0 takes a free one "
                f"(--http {host}:0)"
            ) from None
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{runner.addresses[0][1]}/"
        yield url + (f"?{urlencode({'token': token})}" if token else "")
    finally:
        await runner.cleanup()


# --- access -----------------------------------------------------------------------------------------------------------


def _guard(token: str | None, cookie: str) -> Middleware:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        refused = _refused(request, token, cookie)
        if refused is None and token is not None and "token" in request.query and not request.path.startswith("/api/"):
            refused = _remembered(request, token, cookie)
        try:
            response = refused or await handler(request)
        except web.HTTPException as error:
            _mark(error)
            raise
        if not response.prepared:
            _mark(response)
        return response

    return guard


def _mark(response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


def _refused(request: web.Request, token: str | None, cookie: str) -> web.Response | None:
    if request.method not in ("GET", "HEAD"):
        return web.Response(status=405, headers={"Allow": "GET, HEAD"}, text="the board only answers questions\n")
    if request.path.startswith("/api/") and request.headers.get("Sec-Fetch-Site", "none") not in (
        "same-origin",
        "none",
    ):
        return web.Response(status=403, text="a page of another site asked for this\n")
    if token is None:
        # Another site can let its own name resolve to this machine. The requests of its pages then carry that name.
        if not is_loopback(_hostname(request.host)):
            return web.Response(status=403, text=f"{request.host} is not this machine: ask for 127.0.0.1\n")
        return None
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    # A token in the address goes before the cookie, which may be from an earlier start of the board.
    brought = [request.query["token"]] if "token" in request.query else [bearer, request.cookies.get(cookie, "")]
    if any(hmac.compare_digest(_bytes(given), _bytes(token)) for given in brought):
        return None
    return web.Response(
        status=401,
        headers={"WWW-Authenticate": 'Bearer realm="isthmus board"'},
        text="this board asks for its token: open the URL that `isthmus board` printed, which ends in ?token=…\n",
    )


def _hostname(host: str) -> str:
    found = _HOST.fullmatch(host)
    return (found["name"] or found["address"]) if found else ""


def _bytes(text: str) -> bytes:
    """Return the bytes of a text from a request, even if they were not valid UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def _remembered(request: web.Request, token: str, cookie: str) -> web.Response:
    """Return a redirect to the same page without the token in its address, where others might read it.

    It sets a cookie with the token.
    """
    query = [(name, value) for name, value in request.query.items() if name != "token"]
    # The redirect must stay on this host: a path that begins with two slashes would name another host.
    path = "/" + request.rel_url.raw_path.lstrip("/\\")
    response = web.Response(status=303, headers={"Location": path + (f"?{urlencode(query)}" if query else "")})
    response.set_cookie(cookie, token, httponly=True, samesite="Strict", path="/")
    return response


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException:
        raise
    except IsthmusError as error:
        return _json({"error": str(error)}, _status(error))


def _status(error: IsthmusError) -> int:
    match error:
        case Unknown():
            return 404
        case InputError():
            return 400
        case Denied():
            return 403
        case Unavailable():
            return 503
        case LogCorrupt():
            return 422
        case _:
            return 500


# --- answers ----------------------------------------------------------------------------------------------------------


async def _answer(request: web.Request) -> web.StreamResponse:
    query = {name: request.query.getall(name) for name in request.query}
    return _json(await request.app[_API].answer(request.match_info["path"], query))


def _json(answer: object, status: int = 200) -> web.Response:
    response = web.Response(
        status=status, body=json.dumps(answer, allow_nan=False).encode(), content_type="application/json"
    )
    response.enable_compression()
    return response


async def _static(request: web.Request) -> web.StreamResponse:
    name = request.match_info["path"]
    if name not in (*SCRIPTS, *STYLES, "icon.svg"):
        raise web.HTTPNotFound(text=f"there is no {request.path}\n")
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    response = web.Response(body=(STATIC / name).read_bytes(), content_type=kinds[Path(name).suffix], charset="utf-8")
    response.enable_compression()
    return response


async def _page(request: web.Request) -> web.StreamResponse:
    """Return the page. There is only one, which chooses its view by its address."""
    return web.Response(body=index().encode(), content_type="text/html", charset="utf-8")


def index() -> str:
    """Return the HTML of the page."""
    page = (STATIC / "index.html").read_text()
    styles = "\n".join(f'<link rel="stylesheet" href="/static/{name}">' for name in STYLES)
    scripts = "\n".join(f'<script src="/static/{name}"></script>' for name in SCRIPTS)
    icon = '<link rel="icon" href="/static/icon.svg">'
    return page.replace("<!-- styles -->", f"{icon}\n{styles}").replace("<!-- scripts -->", scripts)


async def _events(request: web.Request) -> web.StreamResponse:
    """Stream the whole state of the run after every change, so that a client need not catch up on missed changes."""
    api, feed = request.app[_API], request.app[_FEED]
    run = f"{feed.log.run.digest[:4].hex()}{id(feed):x}"
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **HEADERS})
    await response.prepare(request)
    seen_run, _, number = request.headers.get("Last-Event-ID", "").rpartition("-")
    seen = int(number) if seen_run == run and number.isdecimal() and len(number) < 16 else -1
    task = asyncio.current_task()
    assert task is not None, "a handler without a task"
    request.app[_STREAMS].add(task)
    try:
        await response.write(b"retry: 1000\n\n")
        while True:
            turn = await feed.changed(seen, QUIET_S)
            if turn <= seen:
                await response.write(b": nothing new\n\n")
                continue
            seen = turn
            state = json.dumps(await api.state({}), allow_nan=False)
            await response.write(f"id: {run}-{turn}\nevent: state\ndata: {state}\n\n".encode())
    except (ConnectionError, asyncio.CancelledError):
        return response
    finally:
        request.app[_STREAMS].discard(task)


async def _close_streams(app: web.Application) -> None:
    for task in tuple(app[_STREAMS]):
        task.cancel()
