"""The board's server streams changes, answers only clients that may ask, and rejects bad questions."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from isthmus.errors import InputError
from isthmus_services.board.api import Api
from isthmus_services.board.server import COOKIE, HEADERS, served
from support.boards import a_board, a_run, ask, costs
from support.world import serving, train

HOSTILE = "x'y&lt;img_src=x_onerror=alert(1)&gt;"


# --- streams ----------------------------------------------------------------------------------------------------------


async def events(url: str, count: int, last: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Return the first events of a stream: id and state."""
    found: list[tuple[str, dict[str, Any]]] = []
    headers = {"Last-Event-ID": last} if last else {}
    async with aiohttp.ClientSession() as session, session.get(f"{url}/api/events", headers=headers) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        number = ""
        async for line in answer.content:
            if line.startswith(b"id: "):
                number = line[4:].decode().strip()
            elif line.startswith(b"data: "):
                found.append((number, json.loads(line[6:])))
                if len(found) == count:
                    return found
    return found


async def test_a_stream_goes_on_where_it_was_cut_off(folder: Path) -> None:
    async with a_run(folder) as w, a_board(w.log, w) as (url, feed):
        ((first, state),) = await events(url, 1)
        assert state["totals"]["commits"] == len(feed.history)
        resumed = asyncio.ensure_future(events(url, 1, first))
        await asyncio.sleep(0.5)
        # Nothing has changed since, so the stream is silent until something does.
        turn = feed.turn
        if not resumed.done():
            assert turn == int(first.rpartition("-")[2])
        async with serving(w.syncer("s2")):
            await train(w.learner("c"), 12)
        ((second, later),) = await asyncio.wait_for(resumed, 30)
        assert second != first
        assert later["turn"] > state["turn"]
        # An id of another server, or nonsense, is answered with the whole state at once.
        for strange in ("0000-7", "x", "-", f"{first}9999999999999999999"):
            assert len(await asyncio.wait_for(events(url, 1, strange), 10)) == 1


# --- who may ask ------------------------------------------------------------------------------------------------------


async def test_only_this_machine_is_answered_and_only_to_its_own_name(folder: Path) -> None:
    async with a_run(folder, ("a",)) as w, a_board(w.log) as (url, _), aiohttp.ClientSession() as session:
        async with session.get(f"{url}/", headers={"Host": "evil.example"}) as answer:
            assert answer.status == 403
            assert "is not this machine" in await answer.text()
        for host in ("localhost:1", "127.0.0.1:8470", "[::1]:8470", "localhost"):
            async with session.get(f"{url}/api/run", headers={"Host": host}) as answer:
                assert answer.status == 200, host
        for host in ("localhost]evil.example", "[::1]evil.example", "127.0.0.1.evil.example", "", "evil.example:127"):
            async with session.get(f"{url}/api/run", headers={"Host": host}) as answer:
                assert answer.status in (400, 403), host
        for site, status in (("same-origin", 200), ("none", 200), ("cross-site", 403), ("same-site", 403)):
            async with session.get(f"{url}/api/run", headers={"Sec-Fetch-Site": site}) as answer:
                assert answer.status == status, site
        for method in ("post", "put", "delete", "patch", "options"):
            async with getattr(session, method)(f"{url}/api/run") as answer:
                assert answer.status == 405, method


async def test_elsewhere_one_must_know_the_token(folder: Path) -> None:
    async with (
        a_run(folder, ("a",)) as w,
        a_board(w.log, token="s3cret") as (url, _),
        aiohttp.ClientSession() as session,
    ):
        for path in ("/", "/api/run", "/api/events", "/static/board.js", "/at/1/learners"):
            async with session.get(url + path) as answer:
                assert answer.status == 401, path
                assert "token" in await answer.text()
        async with session.get(f"{url}/?token=wrong") as answer:
            assert answer.status == 401
        async with session.get(f"{url}/api/run", headers={"Authorization": "Bearer s3cret"}) as answer:
            assert answer.status == 200
        async with session.get(f"{url}/learners?token=s3cret&from=1", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/learners?from=1")
            (cookie,) = answer.cookies.values()
            assert cookie.key.startswith(COOKIE)
            assert cookie["httponly"]
            assert cookie["samesite"] == "Strict"
        # No path leads to another host. A wrong token is rejected, whatever the cookie says.
        for path in ("//evil.example/x", "/%2fevil.example/x", "/%5cevil.example"):
            async with session.get(f"{url}{path}?token=s3cret", allow_redirects=False) as answer:
                assert re.match(r"/[^/\\]", answer.headers["Location"]), path
        async with session.get(f"{url}/?token=zzz", cookies={cookie.key: "s3cret"}, allow_redirects=False) as answer:
            assert answer.status == 401
        async with session.get(f"{url}/api/run", headers={"Authorization": "Bearer \xff"}) as answer:
            assert answer.status == 401
        async with session.get(f"{url}/api/run", cookies={cookie.key: "s3cret"}) as answer:
            assert answer.status == 200


async def test_every_answer_carries_its_policy(folder: Path) -> None:
    async with a_run(folder, ("a",)) as w, a_board(w.log) as (url, _), aiohttp.ClientSession() as session:
        for path in ("/", "/learners/a", "/api/run", "/api/nothing", "/static/board.js", "/static/vendor/../server.py", "/static/no"):  # fmt: skip
            async with session.get(url + path) as answer:
                for name, value in HEADERS.items():
                    assert answer.headers[name] == value, (path, name)
                policy = answer.headers["Content-Security-Policy"]
                assert "unsafe" not in policy
                assert "default-src 'none'" in policy
        async with session.get(f"{url}/static/../server.py") as answer:
            assert "import" not in await answer.text()


@pytest.mark.parametrize(
    ("question", "status", "said"),
    [
        ("nothing", 404, "there is no /api/nothing"), ("commit/0/9999", 404, "no commit 0/9999"),
        ("commit/99/1", 400, "no fragment 99"), ("commit/x/1", 400, "'x' is no whole number"),
        ("learner/nobody", 404, "no learner 'nobody'"), ("state?at=yesterday", 400, "seconds since 1970"),
        ("series?from=20&to=10", 400, "is after"), ("commits?only=good", 400, "there are missed"),
        ("update/0/a%2Fb/1", 404, "no /api"), ("update/0/a/77", 400, "has no record"), ("state?at=nan", 400, "seconds"),
        ("fragment/" + "9" * 30, 400, "no whole number"), ("whatif/0/1?set=x", 400, "NAME=VALUE"),
    ],
)  # fmt: skip
async def test_a_bad_question_gets_a_clear_answer(folder: Path, question: str, status: int, said: str) -> None:
    async with a_run(folder, ("a",)) as w, a_board(w.log) as (url, _):
        assert said in (await ask(url, question, status))["error"]


async def test_an_address_that_is_taken_is_said(folder: Path) -> None:
    async with a_run(folder, ("a",)) as w, a_board(w.log) as (url, feed):
        with pytest.raises(InputError, match=r"--http .*already in use.*port 0 takes a free one"):
            async with served(feed, Api(feed, costs()), url.removeprefix("http://"), None):
                pytest.fail("it listens twice")


async def test_names_of_a_run_stay_data(folder: Path) -> None:
    """A learner's name has only harmless characters. Hostile text can come in an address, or as a tensor's name."""
    name = "a.b-c_d"
    async with a_run(folder, (name,)) as w, a_board(w.log) as (url, _):
        assert (await ask(url, f"learner/{name}"))["row"]["learner"] == name
        async with aiohttp.ClientSession() as session, session.get(f"{url}/learners/{HOSTILE}") as answer:
            assert HOSTILE not in await answer.text(), "a page must contain nothing of its address"
        assert "no learner" in (await ask(url, f"learner/{HOSTILE.replace('/', '')}", 404))["error"]
