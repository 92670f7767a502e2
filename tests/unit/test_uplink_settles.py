"""The uplink sends and settles updates, and what a codec dropped is never lost or sent twice."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as replaced

from isthmus.codecs.kernels import F32
from isthmus.errors import Unavailable
from isthmus.format.layout import Spec, TensorClass
from isthmus.format.records.frame import Blob
from isthmus.format.records.objects import Input, Rejection
from isthmus.format.rules import Pace, Rules
from isthmus.learner.backend import LocalBackend, local_array
from isthmus.learner.boundary import BaseMerged, Captured, UploadDone, UploadFailed
from isthmus.learner.uplink import UNHEARD_MAX, Attempt, Uplink
from isthmus.log import Commit, Log
from isthmus.reasons import Reason
from isthmus.store import Layer
from support.commits import committed, digest_of, given
from support.written_log import Written

PACE = Pace(heartbeat_s=1.0, silence_s=3.0, staleness=1)
PLAIN = Rules(fragments=4, sync_every=4, codec_up="f32", codec_down="f32")
LOSSY = Rules(fragments=4, sync_every=4)


class Learner:
    """One learner's uplink, with the updates it announced (`said`) and its messages to the training thread (`told`)."""

    def __init__(self, w: Written) -> None:
        self.w = w
        self.said: list[Attempt] = []
        self.told: list[object] = []
        backend = LocalBackend(Log(w.run, w.store, w.runtime))
        self.uplink = Uplink(w.run, backend, w.runtime, "a", w.pace, announce=self.said.append, tell=self.told.append)
        self.uplink.incarnation = 1

    def capture(self, base: int, change: F32, p: int = 0, tokens: int = 100, step: int = 1) -> Captured:
        """Return a capture in which training has subtracted `change` [n] from the base."""
        return Captured(
            p, base, np.zeros_like(change), -change, 1, tokens, step, tokens, True, self.w.runtime.now(), 1.0, None
        )

    async def send(self, *captured: Captured) -> None:
        """Upload the captures, and wait until all uploads have ended."""
        async with asyncio.TaskGroup() as tasks:
            for one in captured:
                self.uplink.take(one, tasks, lambda: None)

    def sent(self, base: int, p: int = 0) -> F32:
        """Return the outer gradient that was stored."""
        return self.w.merged(self.uplink.attempts[p][base].key, base + 1, p)[1]

    def residual(self, p: int = 0) -> F32:
        """Return the error feedback for the next update."""
        found = self.uplink.residuals[p]
        assert found is not None
        return local_array(found)

    def input(self, base: int, version: int, p: int = 0) -> Input:
        """Return the input with which a commit names the update on a base."""
        attempt = self.uplink.attempts[p][base]
        return given("a", base, version, p=p, digest=attempt.digest, tokens=attempt.header.tokens)

    def settle(self, version: int, *inputs: Input, p: int = 0, **changed: Any) -> None:
        """Settle the next commit. Without inputs, it merges an update of another learner."""
        header = committed(version, *(inputs or [given("b", version - 1, version, p=p)]), p=p, **changed)
        self.uplink.settle(Commit(header, bytes(32)))


def draw(w: Written, seed: int, p: int = 0) -> F32:
    return np.random.default_rng(seed).normal(size=w.run.layout.fragments[p].size).astype(np.float32)


def close(a: F32, b: F32) -> bool:
    return bool(np.allclose(a, b, rtol=0.0, atol=1e-5))


# --- what an update holds ---------------------------------------------------------------------------------------------


def test_an_update_is_what_training_took_off_its_base() -> None:
    async def body(w: Written) -> None:
        learner, change = Learner(w), np.ones(w.run.layout.fragments[0].size, np.float32)
        await learner.send(learner.capture(0, change))
        assert np.array_equal(learner.sent(0), change)
        [said] = learner.said
        assert (said.header.base, said.header.tokens, said.due) == (0, 100, True)
        assert learner.told == [UploadDone(0)]

    Written(PLAIN, PACE).drive(body)


def test_updates_are_created_and_never_written_over_anything() -> None:
    async def body(w: Written) -> None:
        learner = Learner(w)
        for base in range(3):
            await learner.send(learner.capture(base, draw(w, base)))
        assert len(w.store.of("create", "updates/")) == 3
        assert w.store.of("put") == []

    Written(PLAIN, PACE).drive(body)


def test_an_update_states_its_loss_and_the_learners_manifest() -> None:
    async def body(w: Written) -> None:
        learner = Learner(w)
        learner.uplink.manifest = digest_of("what it trains")
        await learner.send(replace(learner.capture(0, draw(w, 1)), loss=2.5))
        header = learner.uplink.attempts[0][0].header
        assert (header.loss, header.manifest) == (2.5, digest_of("what it trains"))

    Written(PLAIN, PACE).drive(body)


# --- error feedback ---------------------------------------------------------------------------------------------------


def test_what_the_codec_dropped_of_a_merged_update_is_in_the_next_one() -> None:
    async def body(w: Written) -> None:
        learner, first, second = Learner(w), draw(w, 1), draw(w, 2)
        await learner.send(learner.capture(0, first))
        sent = learner.sent(0)
        learner.settle(1, learner.input(0, 1))
        left = learner.residual()
        assert close(left, first - sent)
        assert left.any()
        await learner.send(learner.capture(1, second))
        sent = learner.sent(1)
        assert learner.uplink.residuals[0] is None, "the residual is in this update, and in no other"
        learner.settle(2, learner.input(1, 2))
        assert close(learner.residual(), second + left - sent)

    Written(LOSSY, PACE).drive(body)


def test_two_updates_of_a_learner_in_one_round_carry_each_residual_once() -> None:
    async def body(w: Written) -> None:
        learner, changes = Learner(w), [draw(w, seed) for seed in range(3)]
        await learner.send(learner.capture(0, changes[0]))
        total = learner.sent(0)
        learner.settle(1, learner.input(0, 1))
        # The next update comes late, and is merged together with the one after it.
        await learner.send(learner.capture(1, changes[1]))
        await learner.send(learner.capture(2, changes[2]))
        total = total + learner.sent(1) + learner.sent(2)
        learner.settle(2)
        learner.settle(3, learner.input(1, 3), learner.input(2, 3))
        assert close(total + learner.residual(), changes[0] + changes[1] + changes[2])

    Written(LOSSY, PACE).drive(body)


def test_an_update_merged_at_the_last_moment_leaves_what_its_codec_dropped() -> None:
    async def body(w: Written) -> None:
        learner, change = Learner(w), draw(w, 1)
        await learner.send(learner.capture(0, change))
        sent, late = learner.sent(0), learner.input(0, 2)
        learner.settle(1)
        learner.settle(2, late)
        assert close(learner.residual(), change - sent)

    Written(LOSSY, PACE).drive(body)


def test_what_an_update_carried_comes_back_once_it_can_be_merged_no_more() -> None:
    async def body(w: Written) -> None:
        learner = Learner(w)
        await learner.send(learner.capture(0, draw(w, 1)))
        learner.settle(1, learner.input(0, 1))
        left = learner.residual().copy()
        await learner.send(learner.capture(1, draw(w, 2)))
        learner.settle(2)
        assert learner.uplink.residuals[0] is None, "the update may still be merged, one version late"
        learner.settle(3)
        assert np.array_equal(learner.residual(), left)

    Written(LOSSY, PACE).drive(body)


@pytest.mark.parametrize(("life", "kept"), [(1, True), (2, False)])
def test_what_another_life_of_ours_left_over_is_not_known_so_feedback_starts_anew(life: int, kept: bool) -> None:
    """The merged update of another incarnation had sent this feedback, and only it knows what its codec dropped."""

    async def body(w: Written) -> None:
        learner = Learner(w)
        learner.uplink.residuals[0] = draw(w, 1)
        learner.uplink.residual_of[0] = "an update of the life before"
        learner.settle(1, given("a", 0, 1, "of a twin", incarnation=life))
        assert (learner.uplink.residuals[0] is not None) is kept
        assert (learner.uplink.residual_of[0] != "") is kept

    Written(LOSSY, PACE).drive(body)


# --- settling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_base_is_open_for_as_many_versions_as_staleness_says(staleness: int) -> None:
    async def body(w: Written) -> None:
        learner = Learner(w)
        await learner.send(learner.capture(0, draw(w, 1)))
        account = learner.uplink.accounts[0]
        for version in range(1, staleness + 1):
            learner.settle(version)
            assert account.sent == {0: 100}
            assert account.late == 0
        learner.settle(staleness + 1)
        assert (account.sent, account.late) == ({}, 100)
        assert learner.uplink.attempts[0] == {}

    Written(PLAIN, Pace(heartbeat_s=1.0, silence_s=3.0, staleness=staleness)).drive(body)


def test_a_merged_update_settles_its_base_and_rejects_what_was_sent_on_older_ones() -> None:
    async def body(w: Written) -> None:
        learner = Learner(w)
        for base, tokens in ((0, 30), (1, 70)):
            await learner.send(learner.capture(base, draw(w, base), tokens=tokens))
        learner.told.clear()
        learner.settle(1)
        learner.settle(2, learner.input(1, 2))
        account = learner.uplink.accounts[0]
        assert (account.merged, account.rejected, account.sent) == (70, 30, {})
        assert learner.told == [BaseMerged(0, 1)]

    Written(PLAIN, Pace(heartbeat_s=1.0, silence_s=3.0, staleness=2)).drive(body)


def test_what_another_life_sent_and_this_one_did_not_know_counts_as_trained_and_merged_there() -> None:
    async def body(w: Written) -> None:
        learner = Learner(w)
        await learner.send(learner.capture(0, draw(w, 1)))
        learner.settle(1, replaced(learner.input(0, 1), tokens=130))
        first, *others = learner.uplink.accounts
        assert learner.uplink.tokens_lost == 30
        assert (first.merged, first.lost, first.pending) == (130, 0, 0)
        assert {(other.merged, other.lost) for other in others} == {(0, 30)}, "another life trained the whole model"
        await learner.send(learner.capture(1, draw(w, 2)))
        learner.settle(2, learner.input(1, 2))
        assert (learner.uplink.tokens_lost, first.merged) == (30, 230), "nothing is added if all was known"

    Written(PLAIN, PACE).drive(body)


@pytest.mark.parametrize("room", [0, 7])
def test_a_log_that_says_impossibly_much_was_merged_is_believed_up_to_a_limit(
    room: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(w: Written) -> None:
        learner = Learner(w)
        await learner.send(learner.capture(0, draw(w, 1)))
        learner.uplink.tokens_lost = UNHEARD_MAX - room
        learner.settle(1, replaced(learner.input(0, 1), tokens=108))
        assert "8 tokens of a on version 0 were merged, which is impossibly many" in caplog.text
        assert learner.uplink.tokens_lost == UNHEARD_MAX
        assert [account.merged for account in learner.uplink.accounts] == [100 + room, 0, 0, 0]

    Written(PLAIN, PACE).drive(body)


def test_bases_are_forgotten_once_nothing_can_be_sent_or_merged_on_them() -> None:
    async def body(w: Written) -> None:
        learner = Learner(w)
        account = learner.uplink.accounts[0]
        for base in range(4):
            await learner.send(learner.capture(base, draw(w, base)))
            learner.settle(base + 1, learner.input(base, base + 1))
        assert account.settled.keys() == {2, 3}, "at version 4, a base is open for one version more"
        learner.settle(5)
        learner.settle(6)
        assert account.settled.keys() == {3}, "the model still has version 3"

    Written(PLAIN, PACE).drive(body)


def test_a_rejection_of_a_shorter_update_leaves_the_longer_one_on_its_base_open() -> None:
    def refusal(digest: bytes) -> Rejection:
        return Rejection(learner="a", base=0, reason=Reason.NON_FINITE, digest=digest, count=1, at=0.0)

    async def body(w: Written) -> None:
        learner = Learner(w)
        await learner.send(learner.capture(0, draw(w, 1), tokens=100))
        short = learner.uplink.attempts[0][0].digest
        await learner.send(learner.capture(0, draw(w, 2), tokens=200))
        learner.settle(1, given("b", 0, 1), rejected=(refusal(short), refusal(digest_of("a stranger's"))))
        assert learner.uplink.accounts[0].sent == {0: 200}
        learner.settle(2, given("b", 1, 2), rejected=(refusal(learner.uplink.attempts[0][0].digest),))
        assert (learner.uplink.accounts[0].sent, learner.uplink.accounts[0].rejected) == ({}, 200)

    Written(PLAIN, Pace(heartbeat_s=1.0, silence_s=3.0, staleness=2)).drive(body)


# --- repeated announcements -------------------------------------------------------------------------------------------


def test_a_call_is_answered_with_what_was_sent_for_it_unless_it_was_said_just_now() -> None:
    async def body(w: Written) -> None:
        learner = Learner(w)
        for base in (0, 1):
            await learner.send(learner.capture(base, draw(w, base)))
        learner.said.clear()
        learner.uplink.called(0, 1)
        assert learner.said == [], "the call and the announcement crossed"
        await asyncio.sleep(0.3)
        learner.uplink.called(0, 1)
        learner.uplink.called(0, 3)
        assert [attempt.header.base for attempt in learner.said] == [0]

    Written(PLAIN, PACE).drive(body)


def test_of_each_fragment_the_newest_unsettled_update_is_said_again() -> None:
    async def body(w: Written) -> None:
        learner = Learner(w)
        await learner.send(*(learner.capture(base, draw(w, base)) for base in (0, 1)))
        await learner.send(learner.capture(0, draw(w, 5, 1), p=1))
        learner.said.clear()
        await asyncio.sleep(2.0)
        learner.uplink.repeat()
        assert [(a.header.fragment, a.header.base) for a in learner.said] == [(0, 1), (1, 0)]
        learner.uplink.repeat()
        assert len(learner.said) == 2, "not again before the next heartbeat"

    Written(PLAIN, PACE).drive(body)


# --- the wire ---------------------------------------------------------------------------------------------------------


def test_a_second_upload_that_fails_leaves_the_first_one_as_what_was_sent() -> None:
    async def body(w: Written) -> None:
        learner = Learner(w)
        await learner.send(learner.capture(0, draw(w, 1), tokens=100, step=1))
        learner.told.clear()
        w.store.answers = lambda operation, key: Unavailable("away") if operation == "create" else None
        await learner.send(learner.capture(0, draw(w, 2), tokens=300, step=3))
        assert learner.told == [UploadFailed(0, 0, 1, 100)]
        assert learner.uplink.accounts[0].sent == {0: 100}
        assert learner.uplink.attempts[0][0].header.tokens == 100

    Written(PLAIN, PACE).drive(body)


def test_a_first_upload_that_fails_leaves_nothing_sent() -> None:
    async def body(w: Written) -> None:
        learner = Learner(w)
        w.store.answers = lambda operation, key: Unavailable("away") if operation == "create" else None
        await learner.send(learner.capture(0, draw(w, 2), tokens=300, step=3))
        assert learner.told == [UploadFailed(0, 0, None, 0)]
        assert (learner.uplink.accounts[0].sent, learner.said) == ({}, [])

    Written(PLAIN, PACE).drive(body)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_more_bodies_are_on_the_wire_than_the_window_says_and_each_gets_its_turn(limit: int) -> None:
    async def body(w: Written) -> None:
        learner, under_way, most = Learner(w), set(), []

        class Slow(Layer):
            async def create(self, key: str, data: Blob) -> bool:
                under_way.add(key)
                most.append(len(under_way))
                await asyncio.sleep(1.0)
                under_way.discard(key)
                return await super().create(key, data)

        w.store.inner = Slow(w.store.inner)
        learner.uplink.window.limit = limit
        await learner.send(*(learner.capture(0, draw(w, p, p), p=p) for p in range(4)))
        assert max(most) == limit
        assert sorted(a.header.fragment for a in learner.said) == [0, 1, 2, 3]

    Written(PLAIN, PACE).drive(body)


@pytest.mark.parametrize("fed_back", [False, True])
def test_matrices_are_sent_as_long_as_they_are_and_with_equal_singular_values(fed_back: bool) -> None:
    specs = [
        Spec("m", (30, 20), "float32", TensorClass.DENSE),
        Spec("e", (16, 4), "float32", TensorClass.EMBEDDING),
        Spec("v", (30,), "float32", TensorClass.VECTOR),
    ]
    rules = Rules(fragments=1, sync_every=4, codec_up="bf16", merge="iso", isotropic_up=True, error_feedback=fed_back)

    async def body(w: Written) -> None:
        learner, n = Learner(w), w.run.layout.size
        change = np.random.default_rng(0).normal(size=n).astype(np.float32)
        change *= np.repeat(np.float32(10.0) ** np.linspace(-0.5, 0.5, -(-n // 20), dtype=np.float32), 20)[:n]
        await learner.send(learner.capture(0, change))
        sent = learner.sent(0)
        for t in w.run.layout.fragments[0].tensors:
            here, there = change[t.start : t.stop], sent[t.start : t.stop]
            if t.spec.name != "m":
                assert np.allclose(there, here, rtol=2**-8)
                continue
            values = np.linalg.svd(there.reshape(t.shape).astype(np.float64), compute_uv=False)
            assert np.linalg.norm(there) == pytest.approx(np.linalg.norm(here), rel=1e-3)
            assert values.max() / values.min() < 1.05
            u, _, v = np.linalg.svd(here.reshape(t.shape).astype(np.float64), full_matrices=False)
            assert np.abs(there.reshape(t.shape) / np.linalg.norm(there) - (u @ v) / 20**0.5).max() < 0.01
        await learner.send(learner.capture(1, change))
        assert (learner.uplink.attempts[0][0].residual is not None) is fed_back

    Written(rules, PACE, options={"specs": specs}).drive(body)


def test_zeros_are_sent_as_zeros() -> None:
    rules = Rules(fragments=1, sync_every=4, merge="iso", isotropic_up=True)

    async def body(w: Written) -> None:
        learner = Learner(w)
        await learner.send(learner.capture(0, np.zeros(w.run.layout.size, np.float32)))
        assert not learner.sent(0).any()

    Written(rules, PACE).drive(body)


@pytest.mark.parametrize("fed_back", [False, True])
def test_what_is_not_fed_back_is_sent_at_its_length(fed_back: bool) -> None:
    rules = Rules(fragments=1, sync_every=4, codec_up="q1", error_feedback=fed_back)

    async def body(w: Written) -> None:
        learner = Learner(w)
        change = np.random.default_rng(0).normal(size=w.run.layout.size).astype(np.float32)
        await learner.send(learner.capture(0, change))
        assert bool(np.linalg.norm(learner.sent(0)) > 0.999 * np.linalg.norm(change)) != fed_back

    Written(rules, PACE, options={"specs": [Spec("m", (5000,), "float32", TensorClass.DENSE)]}).drive(body)
