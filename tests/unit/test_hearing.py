"""The messages on the bus show which learners are live, which rounds are open, and which learners these wait for."""

import io
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from isthmus.bus import BusItem
from isthmus.errors import RecordInvalid
from isthmus.format.records.messages import (
    SYNCER_STREAM,
    Alive,
    Announce,
    AnyMessage,
    Call,
    Committed,
    FromSyncer,
    Heartbeat,
    Leave,
    Pass,
    Progress,
    Tally,
    decode,
    encode,
    learner_stream,
)
from isthmus.inspect.bus_view import BusView
from isthmus.inspect.status import Status
from isthmus.log import Commit
from isthmus_services.output import view
from support import commits

RUN = bytes(range(32))


def heard(*messages: AnyMessage, at: float | None = 1.0) -> BusView:
    hearing = BusView(RUN)
    for message in messages:
        take(hearing, message, at)
    return hearing


def take(hearing: BusView, message: AnyMessage, at: float | None) -> None:
    """Take a message as if it came on its author's stream."""
    stream = SYNCER_STREAM if isinstance(message, FromSyncer) else learner_stream(message.learner)
    hearing.take(stream, BusItem("1-0", encode(message)), at)


def call(version: int, fragment: int = 0) -> Call:
    return Call(run=RUN, id="c", syncer="s", fragment=fragment, version=version)


def committed(version: int, fragment: int = 0) -> Committed:
    return Committed(run=RUN, id="k", syncer="s", fragment=fragment, version=version)


def passed(learner: str, version: int) -> Pass:
    return Pass(run=RUN, id="p", learner=learner, fragment=0, version=version)


def here(learner: str, incarnation: int = 1) -> Progress:
    return Progress(run=RUN, id="h", learner=learner, incarnation=incarnation, step=3, tokens_seen=30)


def announced(learner: str, base: int) -> Announce:
    return Announce(
        run=RUN, id="a", learner=learner, incarnation=1, fragment=0, base=base, key="updates/x", digest=bytes(32),
        size=100, steps=1, tokens=10, step=4, tokens_seen=40, due=True, age_s=0.0, step_s=0.1, upload_s=0.1, sync_s=0.1,
    )  # fmt: skip


def alive(*heads: int) -> Alive:
    return Alive(
        run=RUN, id="v", syncer="s", commits=0, heads=heads, rejected={}, waiting_for="", lag_ms=0.0, held=1,
        fold_s=0.0, broken=(), stopping=False,
    )  # fmt: skip


def test_a_called_round_waits_for_who_is_here_and_has_not_answered() -> None:
    hearing = heard(here("a"), here("b"), here("c"), call(5), announced("a", 4), passed("b", 5))
    assert hearing.waited_for(0, hearing.live(0.0)) == {"c"}
    assert hearing.waited_for(1, hearing.live(0.0)) == set(), "fragment 1 has no open round"


def test_an_update_on_an_older_base_is_no_answer_to_this_round() -> None:
    hearing = heard(here("a"), call(5), announced("a", 3), passed("a", 4))
    assert hearing.waited_for(0, {"a"}) == {"a"}


def test_a_commit_ends_the_round_and_an_old_call_opens_none() -> None:
    assert heard(call(5), committed(5)).rounds == {}
    assert heard(call(5), alive(5)).rounds == {}
    assert heard(committed(5), call(5)).rounds == {}
    assert heard(call(5), committed(4)).rounds[0].version == 5
    assert heard(call(5), announced("a", 4), call(5)).rounds[0].answered == {"a"}, "a call may be repeated"


def test_who_is_silent_or_has_left_is_not_waited_for() -> None:
    hearing = heard(here("a"), here("b"), call(5))
    take(hearing, here("b"), 9.0)
    assert hearing.live(5.0) == {"b"}
    take(hearing, Leave(run=RUN, id="l", learner="b", incarnation=1, step=3, done=True), 9.5)
    assert hearing.live(5.0) == set()
    take(hearing, here("b", incarnation=2), 9.9)
    assert hearing.live(5.0) == {"b"}, "b is back as a new incarnation"


def test_the_steps_of_an_incarnation_do_not_run_backwards() -> None:
    """An update that is announced again names the step at which it was captured."""
    hearing = heard(msgspec.structs.replace(here("a"), step=9), announced("a", 4))
    assert hearing.learners["a"].step == 9
    take(hearing, here("a", incarnation=2), 9.0)
    assert hearing.learners["a"].step == 3, "it goes on from a checkpoint"


def test_what_was_said_before_one_listened_proves_no_life() -> None:
    assert heard(here("a"), at=None).live(0.0) == set()


def test_probes_and_nonsense_change_nothing() -> None:
    hearing = heard(here("a"))
    hearing.take("learner/a", BusItem("5-0", b""), 2.0)
    hearing.take("learner/a", BusItem("6-0", b"nonsense"), 2.0)
    assert sum(hearing.invalid.values()) == 1
    assert set(hearing.learners) == {"a"}


def test_a_stream_speaks_for_its_owner_only() -> None:
    hearing = heard(here("a"))
    forged: list[tuple[str, AnyMessage]] = [
        ("learner/mallory", alive(10**9)),
        ("learner/mallory", here("a", 7)),
        ("syncer", here("b")),
        ("x", call(9)),
    ]
    for stream, message in forged:
        hearing.take(stream, BusItem("9-0", encode(message)), 2.0)
    assert hearing.invalid == {"wrong-author": 4}
    assert hearing.heads == {}
    assert hearing.learners["a"].incarnation == 1
    assert set(hearing.learners) == {"a"}


def test_what_people_read_on_a_terminal_holds_no_control_characters() -> None:
    with pytest.raises(RecordInvalid):
        decode(encode(msgspec.structs.replace(alive(1), waiting_for="\x1b]52;c;aGk=\x07")))
    with pytest.raises(RecordInvalid):
        decode(encode(msgspec.structs.replace(alive(1), rejected={"\x1b[2J": 1})))


def test_a_learner_that_is_merged_and_missing_has_an_older_update_in() -> None:
    """A round may merge a learner's update on an older version, and miss the one on the newest."""
    header = commits.committed(5, commits.given("a", 4, 5), commits.given("b", 3, 5))
    header = msgspec.structs.replace(
        header, waited=msgspec.structs.replace(header.waited, expected=("a", "b", "c"), missing=("b", "c"))
    )
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view.fragments(Status(heard(), [Commit(header, bytes(32))], "", 0.0, 1.0), 200))
    shown = console.export_text()
    assert "2/3" in shown
    assert "b (older update in), c" in shown


def test_rejections_that_are_usual_are_called_so() -> None:
    lost, spare = view.rejections({"stale": 3, "base-merged": 13, "duplicate": 2, "of-a-later-release": 1})
    assert lost == (
        "base-merged 13 (usual: another update of its learner was merged before it), of-a-later-release 1, stale 3"
    )
    assert spare == "duplicate 2"


def test_every_field_of_the_json_of_status_is_described() -> None:
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text().partition("## The JSON of status")[2]
    hearing = heard(here("a"), alive(0), call(1))
    found = Status(hearing, [Commit(commits.committed(1, commits.given("a", 0, 1)), bytes(32))], "", 0.0, 1.0).as_json()
    names = set(found)
    for rows in found.values():
        names |= {name for row in rows for name in row} if isinstance(rows, list) else set()
    assert names - set(re.findall(r"`(\w+)`", page)) == {"fragment", "learner", "syncer"}, "they name the rows"
    (line,) = [line for line in page.splitlines() if line.startswith("| `fragments`")]
    assert isinstance(found["fragments"], list)
    assert set(re.findall(r"`(\w+)`", line)) <= {"fragments", "sync_every", *found["fragments"][0]}


def test_what_processes_say_of_themselves_is_shown_and_not_obeyed() -> None:
    hearing = heard(here("a"), msgspec.structs.replace(alive(0), waiting_for="[/x] [red]"))
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(view.tables(Status(hearing, [None], "[/bus]", 0.0, 1.0), 150))
    assert "waiting for [/x] [red]" in console.export_text()


def beat(learner: str, incarnation: int, up: int, down: int, checkpoints: int) -> Heartbeat:
    tokens = Tally(processed=10.0, merged=6.0, overwritten=4.0, late=0.0, pending=0.0, rejected=0.0, lost=0.0)
    return Heartbeat(
        run=RUN, id=f"{learner}{incarnation}", learner=learner, incarnation=incarnation, step=3, steps_target=0,
        tokens_seen=10, loss=1.0, step_s=0.1, upload_s=0.1, sync_s=0.1, versions=(1,), bytes_up=up, bytes_down=down,
        tokens_lost=0, ledger=tokens, waiting_for="", checkpoint_bytes=checkpoints,
    )  # fmt: skip


def test_the_bytes_of_the_run_are_those_of_its_learners_rows() -> None:
    hearing = heard(
        beat("a", 1, 5_000_000, 7_000_000, 1_000_000), beat("b", 1, 2_000_000, 3_000_000, 0),
        beat("a", 2, 900_000, 800_000, 300_000),
    )  # fmt: skip
    status = Status(hearing, [], "", 0.0, 1.0)
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(view.learners(status, 250))
    rows = [[cell.strip() for cell in line.split("│")] for line in console.export_text().splitlines() if "│" in line]
    assert [row[-5:-2] for row in rows] == [["4.6", "1.3", "7.8"], ["2.0", "0.0", "3.0"]]
    assert view.totals(status).endswith("as heard 6.6 MB up, 10.8 MB down, 1.3 MB of checkpoints")


def test_rejected_updates_and_rejected_tokens_are_counted_each_by_its_word() -> None:
    def said(*parts: tuple[float, float]) -> str:
        beats = [
            msgspec.structs.replace(
                beat(f"l{i}", 1, 0, 0, 0),
                ledger=Tally(processed=p, merged=p - r, overwritten=0.0, late=0.0, pending=0.0, rejected=r, lost=0.0),
            )
            for i, (p, r) in enumerate(parts)
        ]
        console = Console(width=250, record=True, file=io.StringIO())
        console.print(view.tables(Status(heard(*beats), [None], "", 0.0, 1.0), 250))
        return next(line.strip() for line in console.export_text().splitlines() if "rejected: " in line)

    assert said((1000.0, 0.0), (1000.0, 0.0)) == "updates rejected: none"
    assert said((1500.0, 28.0), (500.0, 2.0)) == (
        "updates rejected: none; tokens rejected: 30 of 2,000, in rejected updates or sent after a shorter update on "
        "the same base was merged"
    )


def shown(width: int, *beats: Heartbeat) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view.tables(Status(heard(*beats), [None], "", 0.0, 1.0), width))
    return " ".join(console.export_text().split())


def test_what_an_outage_cost_is_told_of_the_tokens_since_the_oldest_message() -> None:
    def told(processed: float, rejected: float, lost: float = 0.0, life: int = 1) -> Heartbeat:
        rest = dict.fromkeys(("overwritten", "late", "pending"), 0.0)
        tally = Tally(processed=processed, merged=processed - rejected - lost, rejected=rejected, lost=lost, **rest)
        return msgspec.structs.replace(beat("a", life, 0, 0, 0), ledger=tally)

    before = told(1000.0, 100.0)
    assert "of the newest" not in shown(200, before, told(3000.0, 100.0)), "none of it is of lately"
    assert "of the newest" not in shown(200, before), "nothing is known of before"
    line = "of the newest 2,000 tokens, as far back as the bus has messages: rejected 50 (2.5%), lost 4 (0.2%)"
    assert line in shown(200, before, told(2000.0, 120.0), told(3000.0, 150.0, 4.0, life=2))
    # Without a checkpoint, all that was there before counts as lost.
    assert "of the newest" not in shown(200, before, told(3000.0, 0.0, 2500.0, life=2))
    assert "of the newest" not in shown(200, told(1000.0, 0.0), told(1500.0, 0.0, 1200.0, life=2))


@pytest.mark.parametrize("part", ["rejected", "lost"])
def test_tokens_that_are_gone_keep_their_column_on_a_narrow_terminal(part: str) -> None:
    sound = beat("a", 1, 0, 0, 0)
    gone = msgspec.structs.replace(sound, ledger=msgspec.structs.replace(sound.ledger, merged=5.0, **{part: 1.0}))
    hidden = re.compile(r"hidden at this width: ([^:]+):")
    of_sound, *_ = hidden.findall(shown(100, sound))
    of_gone, *_ = hidden.findall(shown(100, gone))
    assert part in of_sound.split(", ")
    assert part not in of_gone.split(", ")
    assert "10.0%" in shown(100, gone)
