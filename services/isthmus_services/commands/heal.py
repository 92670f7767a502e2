"""`isthmus heal`: find fragments that cannot be folded to their end; --apply restarts them from published values.

Without --apply nothing is written.
"""

import asyncio

from isthmus.agent.ports import open_log
from isthmus.format.rules import MemberRole
from isthmus.log import Commit, heal
from isthmus.log.heal import Diagnosis
from isthmus.log.holes import GOES_ON, HOLE, damage, spans
from isthmus.log.log_health import NEWEST
from isthmus.log.membership import require_may
from isthmus.wording import counted, fragments, key_flag
from isthmus_services.output import report
from isthmus_services.output.progress import progress
from isthmus_services.settings import declared, shared

MANY = 3
"""So many commits in a row are not lost one by one."""

FRESH_S = 120.0
"""Seconds. If the newest commit is younger, a running syncer may still hold the state that cannot be folded."""


def run(settings: declared.Heal) -> int:
    """Diagnose, heal if asked to, and print. Return 1 if a fragment is left that is not sound, else 0."""
    found, healed, know, now, signed = asyncio.run(_heal(settings))
    left = 0
    hopeless: dict[str, list[int]] = {}
    for diagnosis in found:
        if diagnosis.hopeless:
            hopeless.setdefault(diagnosis.hopeless, []).append(diagnosis.fragment)
    # What is said below the holes is of holes alone.
    for why, of in sorted(hopeless.items(), key=lambda one: GOES_ON in one[0]):
        print(damage(of, why) if GOES_ON in why else f"{fragments(of)} cannot be healed: {why}")
    if any(d.goes_on_from is not None for d in found):
        for line in _to_delete(know, settings.run):
            print(line)
        if any(d.lacking or d.wound for d in found):
            print("start only syncers until the other fragments below are mended: a learner needs all fragments")
    if holes := " ".join(
        f"{d.fragment}/{span}" for d in found if d.holed for span in spans(range(d.hole, d.hole_to + 1))
    ):
        many = max(d.hole_to - d.hole + 1 for d in found if d.holed)
        if many > MANY:
            print(
                f"up to {many} commits in a row are missing in a fragment: as after the store was set back to an older "
                "copy while syncers went on, or after a folder was lost. A newer backup may have them"
            )
        print(
            "holes have not to be mended, and --apply does nothing about them: the run goes on. Without a backup, "
            f"isthmus status {settings.run} --accept-hole {holes} reports it no more, nor does isthmus board "
            f"{settings.run} --accept-hole {holes}, which reads past it, and isthmus gc {settings.run} --accept-hole "
            f"{holes} collects past it, once it is older than the versions that gc keeps"
        )
    for diagnosis in found:
        commit = healed.get(diagnosis.fragment)
        for line in _lines(diagnosis, commit, settings.apply, now):
            print(line)
        left += not diagnosis.sound and commit is None
    sound, holed, lacking = (
        sum(map(bool, ones))
        for ones in ((d.sound for d in found), (d.holed for d in found), (d.lacking for d in found))
    )
    if sound or lacking:
        print(
            f"read: commits, the updates merged since the newest snapshots, and the newest {NEWEST + 1} values; not "
            "read: checkpoints, and older updates, values and snapshots. Syncers go on without these; isthmus replay "
            f"{settings.run} reads all but checkpoints"
        )
    counts = {
        "sound": sound,
        "healed": len(healed),
        f"with {HOLE}": holed,
        "with an object missing that a syncer can make again": lacking,
        "that cannot be folded": left - holed - lacking,
    }
    told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    print(f"{counted(len(found), 'fragment')}: {told}")
    if left and not settings.apply and any(d.wound for d in found):
        key = key_flag("syncer", signed=signed)
        print(
            f"dry run: nothing was written; use --apply{key}, as a syncer, to restart the fragments as described above"
        )
    report.write_json(
        {
            "applied": settings.apply,
            "checkpoints_to_delete": know,
            "fragments": [
                {
                    "fragment": d.fragment,
                    "head": d.head,
                    "sound": d.sound,
                    "healed": healed[d.fragment].version if d.fragment in healed else None,
                    "source": d.wound.source if d.wound else None,
                    "broken_at": d.wound.broken_at if d.wound else None,
                    "key": d.wound.key if d.wound else "",
                    "why": d.wound.why if d.wound else d.hopeless or d.lacking,
                }
                for d in found
            ],
        },
        settings.json,
    )
    return 1 if left else 0


async def _heal(
    settings: declared.Heal,
) -> tuple[list[Diagnosis], dict[int, Commit], list[str], float, bool]:
    healed = {}
    async with open_log(settings.run, shared.trust_in(settings)) as log:
        if settings.apply:
            require_may(log.members, log.signer, MemberRole.SYNCER)
        with progress("folding") as say:
            found = await heal.diagnose(log, settings.fragment, say)
        for diagnosis in found if settings.apply else ():
            if diagnosis.wound is not None and (commit := await heal.heal(log, diagnosis)) is not None:
                healed[diagnosis.fragment] = commit
        lost = {d.fragment: d.goes_on_from for d in found if d.goes_on_from is not None}
        know = await heal.knowing(log, lost) if lost else []
        return found, healed, know, log.runtime.wall(), log.members.signed


def _to_delete(know: list[str], run: str) -> list[str]:
    """Return the lines that name the checkpoints that know a lost version."""
    if not know:
        return ["no checkpoint that can be read here knows a lost version"]
    return [
        "checkpoints that know a lost version: delete them once all learners have stopped (until then learners store "
        "more of them), and before they start",
        *(f"  {run}/{key}" for key in know),
    ]


def _lines(found: Diagnosis, commit: Commit | None, applied: bool, now: float) -> list[str]:
    """Return the lines to print about a fragment; none if all of it is sound, or nothing can be healed."""
    name = f"fragment {found.fragment}"
    if found.wound is None:
        return [f"{name}: {found.lacking}"] if found.lacking else []
    w = found.wound
    lines = [f"{name}, at version {found.head}, cannot be folded beyond version {w.broken_at - 1}: {w.key}: {w.why}"]
    if commit is not None:
        lines.append(f"  healed: version {commit.version} restarts from version {w.source} as published")
        return lines
    if applied:
        return [*lines, "  not healed: a syncer committed in the meantime; run isthmus heal again"]
    lost = "" if w.source == found.head else f"; versions after {w.source} are lost"
    lines.append(f"  --apply restarts it from version {w.source} as published, without its momentum{lost}")
    if now - found.head_at < FRESH_S:
        lines.append(
            f"  its newest commit is {max(0.0, now - found.head_at):.0f} s old: a syncer that runs and merges this "
            "fragment still holds the state. Stop that syncer with SIGTERM, and it writes a snapshot; then nothing is "
            "lost. This does not help if none runs (isthmus status: no syncer is heard), if it cannot fold the "
            "fragment either (isthmus status: cannot be folded), or if it hangs and has not ended after a minute (then "
            "end it with SIGKILL): a backup helps, or --apply"
        )
    return lines
