"""The keys of a demo's run that other machines can reach: its owner's, its syncer's and one for each learner."""

from dataclasses import dataclass
from pathlib import Path

from isthmus.format.records.objects import MemberSpec
from isthmus.format.rules import MemberRole
from isthmus.format.signing import Signer, fingerprint
from isthmus.format.signing.keys import new_signer, write_signer
from isthmus.log import Log
from isthmus.log.membership import write
from isthmus.log.trust import KEY


@dataclass(frozen=True)
class Identities:
    """Private keys, in files that have the names of their processes, and the members of the run."""

    folder: Path
    owner: Signer
    members: tuple[MemberSpec, ...]

    @property
    def file(self) -> Path:
        """The file of the owner's private key."""
        return self.folder / "owner"

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the owner's key."""
        return fingerprint(self.owner.author)

    def of(self, name: str) -> dict[str, str]:
        """Return the environment variable with which a process signs by its own key."""
        return {KEY: str(self.folder / name)}

    async def admit(self, log: Log) -> None:
        """Add the members to a new run. Raises `InputError`, and what the store raises."""
        heads = [0] * len(log.run.layout.fragments)
        await write(log.store, log.members, self.owner, self.members, heads, log.runtime.wall())


def new(folder: Path, learners: int) -> Identities:
    """Create the keys in a folder. Raises `InputError` if a file exists already or cannot be written."""

    def made(name: str) -> Signer:
        signer = new_signer()
        write_signer(folder / name, signer, name)
        return signer

    owner = made("owner")
    # Each start of the syncer has a name of its own: syncer-1, syncer-2, …
    members = [MemberSpec("syncer-*", MemberRole.SYNCER, made("syncer").author)]
    names = [f"learner-{index}" for index in range(learners)]
    members += [MemberSpec(name, MemberRole.LEARNER, made(name).author) for name in names]
    return Identities(folder, owner, tuple(members))
