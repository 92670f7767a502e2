"""A copy of a run that is made while it goes on, by the commands of the page, is a whole run."""

import asyncio
import re
import subprocess
from pathlib import Path

from isthmus.format.rules import Pace, Rules
from isthmus_services.main import main
from support.world import seed_of, serving, train, until, world

PAGE = (Path(__file__).parents[2] / "docs" / "operate.md").read_text()
PACE = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=4)


async def test_the_commands_of_the_page_copy_a_run_that_goes_on(folder: Path, tmp_path: Path) -> None:
    section = PAGE.partition("## Back it up")[2].partition("\n## ")[0]
    commands = [line for line in re.findall(r"^    (.*)$", section, re.MULTILINE) if not line.startswith("isthmus")]
    names = {"RUN": str(folder), "BACKUP": str(copy := tmp_path / "copy")}
    script = re.sub(r"\b(RUN|BACKUP)\b", lambda found: names[found[0]], "\n".join(commands))
    ended = asyncio.Event()
    async with world(folder, seed_of(Rules(fragments=4, sync_every=4), PACE)) as w, serving(w.syncer("s1")) as syncer:
        learning = asyncio.ensure_future(train(w.learner("l0"), 20, enough=ended.is_set))
        await until(lambda: min(k.head for k in syncer.coordinators) >= 10, "it goes on")
        copied = await asyncio.to_thread(subprocess.run, ["bash", "-c", script], capture_output=True, check=False)
        heads = [k.head for k in syncer.coordinators]
        assert not copied.stdout, copied
        await until(lambda: min(k.head for k in syncer.coordinators) >= max(heads) + 5, "it goes on beside the copy")
        ended.set()
        await learning
    assert await asyncio.to_thread(main, ["replay", str(copy)]) == 0
    assert await asyncio.to_thread(main, ["heal", str(copy)]) == 0
    assert not (copy / "bus.sqlite").exists()
