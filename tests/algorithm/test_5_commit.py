"""Step 5: the syncer writes the merge as a commit. The commits are the run: all else can be computed from them."""

import numpy as np

from isthmus.format.records import frame
from isthmus.format.records.frame import Kind
from isthmus.log import fold
from support.written_log import Written


def test_a_commit_names_the_updates_it_merged_and_what_came_of_them() -> None:
    async def body(run: Written) -> None:
        commit = await run.commit(run.upload("a", base=0), run.upload("b", base=0))
        assert [given.learner for given in commit.header.inputs] == ["a", "b"]
        assert commit.header.state_digest == run.states[0].digest
        assert commit.header.previous == run.run.digest, (
            "the first commit follows the run object, each other one a commit"
        )

    Written().drive(body)


def test_of_two_syncers_that_merge_the_same_round_one_wins() -> None:
    """The store creates an object only where there is none: no election and no lock is needed."""

    async def body(run: Written) -> None:
        key = run.upload("a", base=0)
        ours, _ = run.draft(key, writer="syncer-1")
        theirs, _ = run.draft(key, writer="syncer-2")
        assert await run.log.append(0, 1, frame.draft(Kind.COMMIT, ours).blob)
        assert not await run.log.append(0, 1, frame.draft(Kind.COMMIT, theirs).blob)

    Written().drive(body)


def test_folding_the_log_gives_the_state_again_bit_by_bit() -> None:
    """Recovery and replay merge again: state = fold(merge, snapshot, commits). A learner that joins only adds up the
    published values."""

    async def body(run: Written) -> None:
        await run.grow(5)
        at = await fold.fold(run.log, 0, fold.Merging(run.log))
        assert at.version == 5
        assert np.array_equal(at.carried.published, run.states[0].published)
        assert at.carried.digest == run.commits[0][-1].header.state_digest

    Written().drive(body)
