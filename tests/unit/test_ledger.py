"""A learner's ledger counts each token once, whatever becomes of the updates that held it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.learner.ledger import Account, weigh


def counts(account: Account) -> dict[str, int]:
    """Return the counts that are not 0."""
    parts = ("merged", "overwritten", "late", "rejected", "lost", "pending")
    return {part: count for part in parts if (count := getattr(account, part))}


def sent(*updates: tuple[int, int], lost: int = 0) -> Account:
    """Return an account whose learner sent these updates: base and tokens."""
    account = Account(lost=lost)
    for base, tokens in updates:
        assert account.send(base, tokens)
    return account


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(None, {"merged": 100}), (60, {"merged": 60, "rejected": 40}), (100, {"merged": 100})],
    ids=["all", "a shorter update", "as many"],
)
def test_what_a_commit_merged_is_merged_and_the_rest_rejected(tokens: int | None, expected: dict[str, int]) -> None:
    account = sent((3, 80))
    assert account.send(3, 100), "a longer update on the same base takes the place of the first"
    assert counts(account) == {"pending": 100}
    assert account.settle(3, "merged", tokens) == 0
    assert counts(account) == expected
    assert account.settle(3, "merged", 100) == account.settle(3, "late") == account.settle(4, "late") == 0
    assert counts(account) == expected, "a base is settled once, and only if something was sent on it"


@pytest.mark.parametrize("part", ["late", "rejected"])
def test_what_was_given_up_and_is_merged_all_the_same_moves(part: str) -> None:
    account = sent((3, 100), (5, 7))
    account.settle(3, part)
    assert counts(account) == {part: 100, "pending": 7}
    assert not account.send(3, 130), "its base is settled"
    both = {"late": 100, "rejected": 30} if part == "late" else {"rejected": 130}
    assert counts(account) == {**both, "pending": 7}
    assert account.settle(3, "merged", 120) == 0
    assert counts(account) == {"merged": 120, "rejected": 10, "pending": 7}
    assert account.known(3) == 130


def test_what_an_earlier_life_sent_moves_from_lost_to_merged_as_far_as_it_was_lost() -> None:
    account = sent((3, 100), lost=50)
    assert account.settle(3, "merged", 130) == 0
    assert counts(account) == {"merged": 130, "lost": 20}
    assert account.settle(4, "merged", 25) == 5, "five tokens were in no count"
    assert counts(account) == {"merged": 150}


def test_after_a_merge_more_on_the_base_is_rejected_for_good() -> None:
    account = sent((3, 100))
    account.settle(3, "merged")
    assert not account.send(3, 110)
    account.settle(3, "merged", 110)
    assert counts(account) == {"merged": 100, "rejected": 10}


def test_an_update_that_was_never_stored_is_taken_back() -> None:
    account = sent((3, 100))
    account.send(3, 130)
    account.unsend(3, 100)
    assert account.known(3) == 100
    account.unsend(3, None)
    assert (account.known(3), counts(account)) == (0, {})


def test_bases_below_a_version_are_forgotten_and_their_counts_kept() -> None:
    account = sent((3, 10), (4, 20), (5, 40))
    for base in (3, 4):
        account.settle(base, "late")
    account.forget(4)
    assert (account.known(3), account.known(4), account.known(5)) == (0, 20, 40)
    assert account.given_up.keys() == {4}
    assert counts(account) == {"late": 30, "pending": 40}


def test_a_copy_is_independent() -> None:
    account = sent((3, 10), (4, 20))
    account.settle(3, "late")
    copied = account.copy()
    copied.send(5, 1)
    copied.send(3, 15)
    copied.settle(3, "merged")
    assert (counts(account), account.given_up, account.known(3)) == ({"late": 10, "pending": 20}, {3: (10, 0)}, 10)


def test_fragments_weigh_by_their_shares() -> None:
    one, other = Account(merged=8, local=4), Account(merged=4, rejected=8)
    tally = weigh([one, other], [0.25, 0.75], processed=12)
    assert (tally.processed, tally.merged, tally.rejected, tally.pending) == (12.0, 5.0, 6.0, 1.0)


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["train", "send", "merged", "late", "rejected", "all", "forget"]), st.integers(0, 5),
              st.integers(1, 40)),
    max_size=40,
)  # fmt: skip


@given(STEPS)
def test_no_token_is_counted_twice_or_not_at_all(steps: Sequence[Step]) -> None:
    account, trained = Account(), 0
    for what, base, tokens in steps:
        if what == "train":
            account.local += tokens
            trained += tokens
        elif what == "send" and account.local:
            more = min(tokens, account.local)
            account.send(base, account.known(base) + more)
            account.local -= more
        elif what in ("late", "rejected"):
            account.settle(base, what)
        elif what == "merged":
            account.settle(base, what, tokens)
        elif what == "all":
            account.settle(base, "merged")
        elif what == "forget":
            account.forget(base)
        assert account.processed == trained
        assert min(counts(account).values(), default=0) >= 0
