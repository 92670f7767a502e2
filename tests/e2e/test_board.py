"""The board works in a real browser: during a demo whose processes are killed, on the recorded run, and as one file.

`BOARD_PICTURES=docs/images` renews the pictures of docs/board.md.
"""

import asyncio
import json
import os
import pydoc_data.topics
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect

from isthmus.agent.ports import open_log
from isthmus.inspect.export import versions_at
from isthmus.log import Log
from isthmus_services.processes import isthmus_command
from isthmus_services.servers import free_ports
from support.browsers import chromium
from support.world import all_commits

STEPS, LEARNERS = 80, 3
TEXT = pydoc_data.topics.__file__
"""A short text: of the default one, more is held out than a demo of a few steps takes to train on."""

PATIENCE_MS = 30_000
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

PAGES = {
    "run": "/", "learners": "/learners", "learner": "/learners/learner-1", "fragments": "/fragments",
    "fragment": "/fragments/0", "commits": "/commits", "commit": "/commits/0/2", "services": "/services",
    "about": "/about",
}  # fmt: skip
READY = {"about": "#words", "run": "#totals"}
"""By page, the selector of an element that appears once the page has its data. Other pages have a table."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start Debian's Chromium."""
    with chromium() as found:
        yield found


@dataclass
class Seen:
    """A page, and the messages of its console."""

    page: Page
    base: str
    console: list[str] = field(default_factory=list)

    def open(self, path: str, ready: str = "") -> Page:
        """Go to a page; wait for its content."""
        self.page.goto(self.base + path)
        if ready:
            self.page.wait_for_selector(ready, timeout=PATIENCE_MS)
        return self.page

    def totals(self) -> dict[str, int]:
        """Return the numbers in the tiles of the run's page."""
        return {name: whole(self.page.locator(f"#{name}").inner_text()) for name in ("commits", "rejected")}

    def versions(self) -> list[int]:
        """Return the version of each fragment that the fragments' page shows."""
        return [whole(text) for text in self.page.locator("[data-version]").all_inner_texts()]


def whole(text: str) -> int:
    return int(text.replace(",", ""))


@contextmanager
def looking(browser: Browser, base: str, **how: Any) -> Iterator[Seen]:
    """Open a page; at the end its console must hold no error and no warning."""
    context: BrowserContext = browser.new_context(**{"viewport": WIDE, "timezone_id": "UTC", "locale": "en-GB"} | how)
    context.set_default_timeout(PATIENCE_MS)
    seen = Seen(context.new_page(), base.rstrip("/"))
    seen.page.on("console", lambda m: seen.console.append(m.text) if m.type in ("error", "warning") else None)
    seen.page.on("pageerror", lambda error: seen.console.append(str(error)))
    try:
        yield seen
        assert seen.console == []
    finally:
        context.close()


@dataclass
class Demo:
    """A demo with its board."""

    process: subprocess.Popen[str]
    url: str
    out: Path

    @property
    def run(self) -> str:
        """The address of the demo's run."""
        return str(self.out / "run")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """Start `isthmus demo --board`, whose learners and syncers are killed."""
    out = tmp_path_factory.mktemp("board") / "demo"
    process = subprocess.Popen(
        isthmus_command("demo", "--steps", str(STEPS), "--learners", str(LEARNERS), "--kill-every", "5",
                        "--kill-syncer-every", "8", "--data", TEXT, "--board", "--out", str(out)),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("board "):
            break
    else:
        pytest.fail("".join(said), pytrace=False)
    # The rest of the output must be read, or the demo blocks when the pipe is full.
    with open(out.parent / "demo.log", "w") as log:
        reader = subprocess.Popen(["cat"], stdin=process.stdout, stdout=log)
    try:
        yield Demo(process, line.split()[1], out)
    finally:
        process.terminate()
        process.wait(60)
        reader.wait(10)
        process.stdout.close()


@dataclass
class Live:
    """What the page and `isthmus status` showed while the demo ran."""

    before: list[int]
    """Versions on the page, read before `isthmus status` ran."""
    status: list[int]
    learners: str
    running: bool
    """Whether the demo was still running at the end."""


@pytest.fixture(scope="module")
def live(browser: Browser, demo: Demo) -> Live:
    """Look at the page while the demo runs. A fixture makes this happen first, in any order of the tests."""
    with looking(browser, demo.url) as seen:
        page = seen.open("/", "#totals")
        expect(page.locator("#connection")).to_have_text("connected", timeout=PATIENCE_MS)
        expect(page.locator("#sentence")).to_have_text(
            re.compile("learners train|learners were heard"), timeout=120_000
        )
        seen.open("/learners", "tbody tr")
        expect(page.locator("tbody").first).to_contain_text("training", timeout=120_000)
        learners = page.locator("tbody").first.inner_text()
        seen.open("/", "#totals")
        wait(page, lambda: seen.totals()["commits"] >= 20, "twenty commits")
        first = seen.totals()["commits"]
        wait(page, lambda: seen.totals()["commits"] > first, "another commit, without a click")
        seen.open("/fragments", "[data-version]")
        before = seen.versions()
        said = [f["version"] for f in status(demo.run)["fragments"]]
        wait(page, lambda: all(a >= b for a, b in zip(seen.versions(), said, strict=True)), "what status has seen")
        return Live(before, said, learners, demo.process.poll() is None)


@pytest.fixture(scope="module")
def recorded(demo: Demo, live: Live) -> str:
    """Return the demo's run after the demo has ended."""
    assert live, "the page was looked at during the demo"
    assert demo.process.wait(240) == 0, (demo.out.parent / "demo.log").read_text()[-3000:]
    return demo.run


@contextmanager
def board(run: str, port: int = 0, host: str = "127.0.0.1", **more: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve a run with `isthmus board`."""
    process = subprocess.Popen(
        isthmus_command("board", run, "--http", f"{host}:{port}"), stdout=subprocess.PIPE, text=True,
        env={**os.environ, **more},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield next(word for word in process.stdout.readline().split() if word.startswith("http://")), process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def base(recorded: str) -> Iterator[str]:
    """Serve the board of the recorded run."""
    with board(recorded) as (url, _):
        yield url


def wait(page: Page, condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    """Wait for a condition on a page; the page runs meanwhile."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"never seen: {what}"
        page.wait_for_timeout(100)


def same(seen: Seen, commits: int) -> bool:
    return seen.totals()["commits"] == commits


def asked(run: str, question: Callable[[Log], Any]) -> Any:
    async def body() -> Any:
        async with open_log(run) as log:
            return await question(log)

    # Playwright has its own event loop in this thread.
    with ThreadPoolExecutor(1) as other:
        return other.submit(asyncio.run, body()).result()


def status(run: str) -> dict[str, Any]:
    """Return the report of `isthmus status`."""
    path = Path(run).parent / "status.json"
    subprocess.run(isthmus_command("status", run, "--json", str(path)), check=True, capture_output=True)
    return dict(json.loads(path.read_text()))


# --- while a demo runs ------------------------------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_beside_a_demo_the_page_lives_and_says_what_status_says(live: Live) -> None:
    assert all(a <= b for a, b in zip(live.before, live.status, strict=True)), "the page was ahead of the log"
    assert "training" in live.learners
    assert live.running, "the demo was over before the page was looked at: it needs more steps"


@pytest.mark.tier("test")
def test_when_it_is_over_the_numbers_are_those_of_status(browser: Browser, recorded: str, base: str) -> None:
    found = status(recorded)
    with looking(browser, base) as seen:
        page = seen.open("/", "#totals")
        done = sum(learner["state"] == "done" for learner in found["learners"])
        # The bus may lose any message. If it lost a leave message, status and the page both call that learner silent.
        said = f"Nobody trains: {done} of {done} learners are done." if done == LEARNERS else f"0 of {LEARNERS - done} learners train. {done} are done."  # fmt: skip
        expect(page.locator("#sentence")).to_have_text(said)
        versions = [f["version"] for f in found["fragments"]]
        assert seen.totals()["commits"] == sum(versions)
        seen.open("/fragments", "[data-version]")
        assert seen.versions() == versions
        page = seen.open("/learners", "tbody tr")
        cells = {row.split("\t")[0].strip(): [cell.strip() for cell in row.split("\t")] for row in page.locator("tbody tr").all_inner_texts()}  # fmt: skip
        for learner in found["learners"]:
            row = cells[learner["learner"]]
            assert row[1:4] == [learner["state"], str(learner["incarnation"]), f"{STEPS}/{STEPS}"]
            assert float(row[4]) == pytest.approx(learner["loss"], rel=1e-3)


@pytest.mark.tier("test")
def test_kills_show_as_lives_and_takeovers(browser: Browser, demo: Demo, base: str) -> None:
    report = json.loads((demo.out / "report.json").read_text())
    assert report["kills_by_kind"]["learner"] >= 1
    with looking(browser, base) as seen:
        page = seen.open("/services", "tbody tr")
        text = page.locator("main").inner_text()
        for kill in report["kill_list"]:
            if kill["kind"] == "learner" and kill["recovery_s"] is not None:
                assert re.search(rf"{kill['name']}\t[2-9]", text), kill
        page = seen.open("/learners", "canvas")
        canvas = page.locator("canvas")
        canvas.focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator(".readout")).to_contain_text("learner-0,")
        page.keyboard.press("ArrowDown")
        expect(page.locator(".readout")).to_contain_text("learner-1,")
        page.keyboard.press("Enter")
        # If the nearest event is that a round stopped or began to expect this learner, the commit of that round opens.
        page.wait_for_url(re.compile(r"/(learners|updates|commits)/"))


# --- each page of the recorded run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_page_is_for_everybody(browser: Browser, base: str, scheme: str) -> None:
    """Check WCAG A and AA as far as axe can. No page scrolls sideways at any width, and the console stays empty."""
    for size, name in ((WIDE, "wide"), (PHONE, "phone")):
        with looking(browser, base, viewport=size, color_scheme=scheme) as seen:
            for which, path in PAGES.items():
                page = seen.open(path, READY.get(which, "tbody tr"))
                page.wait_for_load_state("networkidle") if which == "about" else page.wait_for_timeout(300)
                found = Axe().run(
                    page, options={"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}}
                )
                wrong = [(v["id"], [node["html"][:200] for node in v["nodes"]]) for v in found.response["violations"]]
                assert wrong == [], (which, name, scheme)
                assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], (which, name)
                assert page.title().endswith("· run")


@pytest.mark.parametrize(("size", "cut"), [(WIDE, True), (PHONE, True), ({"width": 4000, "height": 900}, False)])
def test_a_table_that_is_cut_says_so(browser: Browser, base: str, size: Any, cut: bool) -> None:
    with looking(browser, base, viewport=size) as seen:
        page = seen.open("/learners", "tbody tr")
        note = page.locator(".note.sideways")
        if cut:
            expect(note).to_contain_text("20 columns: scroll the table sideways")
        else:
            page.evaluate("document.querySelector('main').style.maxWidth = 'none'")
            expect(note).to_have_count(0)


def test_a_run_that_is_over_is_told_of_in_the_past(browser: Browser, base: str) -> None:
    with looking(browser, base) as seen:
        page = seen.open("/", "#totals")
        tile = page.locator(".tile").filter(has_text="Missed their round")
        expect(tile).to_contain_text("the next round could still merge them")


def test_it_works_without_a_mouse(browser: Browser, base: str) -> None:
    with looking(browser, base) as seen:
        page = seen.open("/", "#totals")
        page.keyboard.press("Tab")
        expect(page.locator(":focus")).to_have_text("Skip to the content")
        page.keyboard.press("Enter")
        expect(page.locator("main")).to_be_focused()
        page.keyboard.press("Tab")  # to the first term with an explanation
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
        page.keyboard.press("Enter")
        expect(page.locator("details[open] span").first).to_be_visible()
        page = seen.open("/learners", "tbody tr")
        page.get_by_role("button", name="step", exact=True).focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("columnheader", name=re.compile("^step"))).to_have_attribute("aria-sort", "descending")
        page.locator("#scrubber").focus()
        page.keyboard.press("Home")
        page.wait_for_url(re.compile("/at/.*/learners"))


def test_a_commit_shows_its_round_and_links_to_its_updates_and_back(browser: Browser, base: str, recorded: str) -> None:
    commit = asked(recorded, lambda log: log.commit(0, 2))
    h = commit.header
    with looking(browser, base) as seen:
        page = seen.open("/commits/0/2", "svg[role=img]")
        label = page.locator(".round svg").get_attribute("aria-label") or ""
        for given in h.inputs:
            assert f"{given.learner}: merged" in label
        assert f"closed ({h.waited.closed_by})" in label
        page.get_by_role("link", name=f"from version {h.inputs[0].base}").first.click()
        page.wait_for_url(re.compile(r"/updates/0/"))
        expect(page.locator("main")).to_contain_text("merged into version 2")
        page.get_by_role("link", name="0/2", exact=True).click()
        page.wait_for_url(re.compile(r"/commits/0/2$"))


def test_what_if_is_asked_of_one_round(browser: Browser, base: str) -> None:
    with looking(browser, base) as seen:
        page = seen.open("/commits/0/2", "#whatif")
        page.locator("#whatif select").select_option("avg")
        page.get_by_role("button", name="Compute").click()
        expect(page.locator("#whatif-answer")).to_contain_text("merge=avg", timeout=PATIENCE_MS)
        expect(page.locator("#whatif-answer")).to_contain_text("of the step")


def test_time_axes_have_hours_and_the_date_where_days_change(browser: Browser, base: str) -> None:
    midnight = datetime(2026, 11, 28, tzinfo=UTC).timestamp()
    with looking(browser, base) as seen:
        page = seen.open("/", "#totals")
        for begin, end, words in (
            (43200, 64800, "12:00 14:00 16:00 18:00"),
            (43200, 43320, "12:00:00 12:00:30 12:01:00 12:01:30 12:02:00"),
            (1, 3, "00:00:01.0 00:00:01.5 00:00:02.0 00:00:02.5 00:00:03.0"),
            (-30, 61, "23:59:30 27 Nov 00:00:00 28 Nov 00:00:30 00:01:00"),
            (0, 2.5 * 86400, "28 Nov 29 Nov 30 Nov"),
        ):
            ticks = page.evaluate(f"Isthmus.timeTicks({midnight + begin}, {midnight + end}, 4)")
            assert " ".join(word for _, *both in ticks for word in both if word) == words


@pytest.mark.tier("test")
def test_losses_cover_the_whole_run_and_come_first_and_no_chart_is_empty(
    browser: Browser, base: str, recorded: str, tmp_path: Path
) -> None:
    stated = [i for of in asked(recorded, all_commits).values() for c in of for i in c.header.inputs]
    assert stated
    assert all(i.loss is not None for i in stated), "the demo's loop gives its loss"
    with urllib.request.urlopen(f"{base}api/series") as answer:
        losses = json.load(answer)["losses"]["learners"]
    assert losses.keys() == {i.learner for i in stated}
    assert all(sum(x is not None for x in line) > 2 for line in losses.values()), "more than what was heard last"
    out = tmp_path / "page.html"
    subprocess.run(isthmus_command("board", recorded, "--export", str(out)), capture_output=True, check=True)
    for address, how in ((base, {}), (out.as_uri(), {"offline": True})):
        with looking(browser, address, **how) as seen:
            page = seen.open("" if how else "/", "figure canvas")
            first = page.locator("figure").first
            expect(first.locator("figcaption")).to_contain_text("Training loss")
            tokens = page.locator("figure").filter(has_text="Tokens processed and merged")
            expect(tokens.locator(".note")).to_contain_text(
                re.compile(r"Bold: mean over [\d.]+ \w+\. Faint, and the numbers beside the names: each ")
            )
            assert all(f"{name}: training loss " in first.locator(".legend").inner_text() for name in losses)
            for figure in page.locator(".charts figure").all():
                assert figure.locator("canvas, p.note").count(), figure.inner_text()
    with looking(browser, base) as seen:  # a stretch before the run
        page = seen.open("/?from=1000000000&to=1000000100", ".charts figure")
        expect(page.locator("figure").first).to_contain_text("No commit was written in this stretch of time")


# --- time travel ------------------------------------------------------------------------------------------------------


def test_the_scrubbers_figures_are_those_of_the_fold(browser: Browser, base: str, recorded: str) -> None:
    headers = sorted((c.header for of in asked(recorded, all_commits).values() for c in of), key=lambda h: h.written_at)
    with looking(browser, base) as seen:
        page = seen.open("/", "#totals")
        for place in (300, 700, 900):
            page.locator("#scrubber").evaluate(
                "(s, v) => { s.value = v; s.dispatchEvent(new Event('input', { bubbles: true })); }", place
            )
            page.wait_for_url(re.compile(r"/at/"))
            page.wait_for_timeout(600)
            stamp = re.search(r"/at/([^/]+)", page.url)
            assert stamp is not None
            at = datetime.fromisoformat(stamp[1].replace("Z", "+00:00")).timestamp()
            then = [h for h in headers if h.written_at <= at]
            wait(page, partial(same, seen, len(then)), "the figures of then")
            expect(page.locator("#moment")).to_contain_text(datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S"))
            seen.open(f"/at/{stamp[1]}/fragments", "[data-version]")
            assert seen.versions() == asked(recorded, partial(versions_at, time=at))
            seen.open(f"/at/{stamp[1]}/", "#totals")
        page.get_by_role("button", name="Now").click()
        page.wait_for_url(lambda url: "/at/" not in url)
        expect(page.locator("#commits")).to_have_text(f"{len(headers):,}")


def test_an_address_that_is_none_is_said(browser: Browser, base: str) -> None:
    with looking(browser, base) as seen:
        for path, said in (
            ("/at/nonsense/learners", "There is no such moment"), ("/at/99999999999999/", "There is no such moment"),
            ("/learners/%zz", "There is no such page"),
        ):  # fmt: skip
            expect(seen.open(path).locator("main")).to_contain_text(said)
        page = seen.open("/", "#totals")
        page.locator("#when").fill("yesterday")
        page.get_by_role("button", name="Go").click()
        assert page.evaluate("document.getElementById('when').validationMessage") != ""


def test_the_slider_at_its_end_is_now(browser: Browser, base: str) -> None:
    with looking(browser, base) as seen:
        page = seen.open("/", "#totals")
        page.locator("#scrubber").focus()
        page.keyboard.press("Home")
        page.wait_for_url(re.compile("/at/"))
        page.keyboard.press("End")
        page.wait_for_url(lambda url: "/at/" not in url)


def test_a_link_to_a_moment_can_be_shared(browser: Browser, base: str) -> None:
    with looking(browser, base) as seen:
        page = seen.open("/at/2001-01-01T00:00:00Z/", "#totals")
        expect(page.locator("#sentence")).to_have_text("Nothing had been merged yet.")
        page.get_by_role("link", name="Learners").click()
        assert "/at/2001-01-01T00:00:00.000Z/learners" in page.url
        page.go_back()
        expect(page.locator("#sentence")).to_have_text("Nothing had been merged yet.")


# --- when something goes wrong ----------------------------------------------------------------------------------------


def test_a_page_comes_back_when_the_server_was_killed(browser: Browser, recorded: str) -> None:
    (port,) = free_ports(1)
    with looking(browser, f"http://127.0.0.1:{port}") as seen:
        with board(recorded, port) as (_, process):
            page = seen.open("/", "#totals")
            expect(page.locator("#connection")).to_have_text("connected")
            process.kill()
            expect(page.locator("#connection")).to_contain_text("has not answered since", timeout=PATIENCE_MS)
            expect(page.locator("#commits")).not_to_have_text("")
        with board(recorded, port):
            expect(page.locator("#connection")).to_have_text("connected", timeout=PATIENCE_MS)
            page.get_by_role("link", name="Commits").click()
            page.wait_for_selector("tbody tr")
        # The browser's own messages on a server that is gone are not errors of the page.
        seen.console[:] = [line for line in seen.console if "ERR_" not in line]


def test_what_is_not_there_is_said(browser: Browser, base: str) -> None:
    with looking(browser, base) as seen:
        for path, said in (
            ("/commits/0/99999", "there is no commit 0/99999"), ("/learners/nobody", "no learner 'nobody'"),
            ("/nothing", "There is no such page"), ("/fragments/77", "there is no fragment 77"),
        ):  # fmt: skip
            page = seen.open(path)
            expect(page.locator("main")).to_contain_text(said)
        # A browser logs each answer that is not 200 as a failure.
        seen.console[:] = [line for line in seen.console if "Failed to load resource" not in line]


def test_names_of_others_are_shown_and_never_run(browser: Browser, recorded: str, tmp_path: Path) -> None:
    """Replace names in the server's answers by HTML: the page shows them as text."""
    hostile = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
    with board(recorded) as (url, _), looking(browser, url) as seen:
        with urllib.request.urlopen(f"{url}api/services") as answer:
            began = min((r["began"] for r in json.load(answer)["restarts"]), default=0.0)

        def change(route: Any) -> None:
            answer = route.fetch()
            route.fulfill(response=answer, body=answer.text().replace("learner-1", json.dumps(hostile)[1:-1]))

        seen.page.route(
            "**/api/**", lambda route: route.continue_() if "events" in route.request.url else change(route)
        )
        for path in ("/learners", "/learners/learner-1", "/commits/0/2", "/services"):
            page = seen.open(path, "tbody tr")
            page.wait_for_timeout(300)
            assert page.title() != "run"
            assert page.locator("main img, main script").count() == 0
        assert hostile in seen.open("/learners", "tbody tr").locator("tbody").inner_text()
        hostile = "constructor"  # a property that every JavaScript object has
        page = seen.open(f"/learners?from={began - 5:.3f}&to={began + 5:.3f}", "canvas")
        expect(page.locator("figcaption").last).to_have_text("What each learner did, over time")
        page.locator("canvas").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator(".readout")).to_contain_text("constructor,")


def test_elsewhere_it_is_opened_by_the_address_that_is_printed(browser: Browser, recorded: str) -> None:
    with board(recorded, host="0.0.0.0") as (url, _):
        address = urlsplit(url)
        assert re.fullmatch(r"token=[\w-]{16,}", address.query)
        here = f"http://127.0.0.1:{address.port}"
        with looking(browser, here) as seen:
            page = seen.open(f"/learners?{address.query}", "tbody tr")
            assert page.url == f"{here}/learners", "the token does not stay in the address"
            expect(page.locator("#connection")).to_have_text("connected")
            assert page.evaluate("document.cookie") == "", "no script can read the cookie"
        with looking(browser, here) as seen:
            page = seen.open("/")
            expect(page.locator("body")).to_contain_text("this board asks for its token")
            seen.console[:] = [line for line in seen.console if "401" not in line]


def test_the_pictures_of_the_documentation(browser: Browser, base: str, recorded: str, tmp_path: Path) -> None:
    """Make the pictures; `BOARD_PICTURES=docs/images` writes them there."""
    folder = Path(os.environ.get("BOARD_PICTURES", tmp_path))
    with urllib.request.urlopen(f"{base}api/services") as answer:
        began = min((r["began"] for r in json.load(answer)["restarts"]), default=0.0)
    with urllib.request.urlopen(f"{base}api/commits?only=missed_round") as answer:
        late = json.load(answer)["commits"]
    commit = max(late, key=lambda c: (c["waited_s"] > 0.1, c["inputs"]), default={"fragment": 0, "version": 2})
    shown = {
        "run": ("/", "#totals", WIDE | {"height": 1120}, "light"),
        "learners": (f"/learners?from={began - 8:.3f}&to={began + 8:.3f}", "canvas", WIDE, "light"),
        "commit": (f"/commits/{commit['fragment']}/{commit['version']}", ".round svg", WIDE | {"height": 800}, "light"),
        "fragments": ("/fragments", "canvas", WIDE | {"height": 760}, "light"),
        "phone": ("/", "#totals", PHONE, "dark"),
    }
    page = (Path(__file__).parents[2] / "docs" / "board.md").read_text()
    assert set(re.findall(r"images/board-(\w+)\.png", page)) == shown.keys()
    for name, (path, ready, size, scheme) in shown.items():
        with looking(browser, base, viewport=size, color_scheme=scheme) as seen:
            opened = seen.open(path, ready)
            opened.wait_for_timeout(800)
            # The documentation must not show the temporary folder of a test.
            opened.locator(".where").evaluate("(where) => { where.textContent = 'out/demo/run'; }")
            opened.screenshot(path=folder / f"board-{name}.png")
        assert (folder / f"board-{name}.png").stat().st_size > 20_000


# --- one file ---------------------------------------------------------------------------------------------------------


def test_the_file_opens_offline_and_travels_in_time(browser: Browser, recorded: str, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = subprocess.run(
        isthmus_command("board", recorded, "--export", str(out)), capture_output=True, text=True, check=True
    )
    assert "open it in any browser, even offline" in done.stdout
    versions = asked(recorded, versions_at)
    with looking(browser, out.as_uri(), offline=True) as seen:
        page = seen.open("", "#totals")
        assert seen.totals()["commits"] == sum(versions)
        expect(page.locator("#connection")).to_contain_text("a file, written")
        for path, ready in (
            ("#/learners", "canvas"), ("#/fragments", "[data-version]"), ("#/services", "tbody tr"), ("#/about", "#words"),
            ("#/learners/learner-1", "tbody tr"), ("#/commits", "tbody tr"),
        ):  # fmt: skip
            seen.open(path, ready)
            if path == "#/fragments":
                assert seen.versions() == versions
        page = seen.open("#/", "#totals")
        page.locator("#scrubber").evaluate(
            "(s) => { s.value = 600; s.dispatchEvent(new Event('input', { bubbles: true })); }"
        )
        page.wait_for_url(re.compile(r"#/at/"))
        page.wait_for_timeout(500)
        stamp = re.search(r"#/at/([^/?]+)", page.url)
        assert stamp is not None
        at = datetime.fromisoformat(stamp[1].replace("%3A", ":").replace("Z", "+00:00")).timestamp()
        assert seen.totals()["commits"] == sum(asked(recorded, partial(versions_at, time=at)))
        for path in ("commits", "services", "fragments/0", "learners/learner-1"):
            page = seen.open(f"#/at/{stamp[1]}/{path}")
            expect(page.locator("main")).to_contain_text("as of the run's end only")
        newest = f"#/commits/0/{versions[0]}"
        page = seen.open(newest, "#whatif")
        page.locator("#whatif select").select_option("avg")
        page.get_by_role("button", name="Compute").click()
        expect(page.locator("main")).to_contain_text("A file cannot fold the log again")


def test_it_changes_nothing_in_a_run_but_its_own_cache(recorded: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded, run, ignore=shutil.ignore_patterns(".board", "bus.sqlite*"))

    def there() -> dict[str, tuple[int, int]]:
        paths = [p for p in run.rglob("*") if p.is_file() and ".board" not in p.parts]
        return {str(p.relative_to(run)): (p.stat().st_size, p.stat().st_mtime_ns) for p in paths}

    before = there()
    with board(str(run)) as (url, _):
        for question in ("state", "series", "learners", "commit/0/2", "whatif/0/2?set=merge=avg", "services"):
            with urllib.request.urlopen(f"{url}api/{question}") as answer:
                assert answer.status == 200
    out = tmp_path / "page.html"
    subprocess.run(isthmus_command("board", str(run), "--export", str(out)), capture_output=True, check=True)
    assert there() == before
    assert [p.suffix for p in (run / ".board").iterdir()] == [".npz"]
