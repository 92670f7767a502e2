"""Stand for a folder whose mount can be lost: the library's own check of the folder runs on real inodes."""

import itertools
from pathlib import Path

from isthmus.format.records.keys import RUN_KEY
from isthmus.runtime.clock import Runtime
from isthmus.store import FileStore
from isthmus_lab.simulate.store import Objects

_numbers = itertools.count()


class Mounted:
    """One process's view of the store: the run's objects, or none if the mount is lost."""

    def __init__(self, objects: Objects, runtime: Runtime, folder: str) -> None:
        place = Path(folder) / str(next(_numbers))
        self._root, self._mounted, self._below = place / "root", place / "mounted", place / "below"
        for path in (self._mounted, self._below):
            path.mkdir(parents=True)
        (self._mounted / RUN_KEY).write_bytes(objects.get(RUN_KEY))
        self._root.symlink_to(self._mounted)
        self._objects, self._nothing = objects, Objects()
        self._files = FileStore(self._root, runtime)
        self._unmounted = False

    def objects(self, unmounted: bool) -> Objects:
        """See `Mount.objects`."""
        if unmounted != self._unmounted:
            self._unmounted = unmounted
            self._root.unlink()
            self._root.symlink_to(self._below if unmounted else self._mounted)
        self._files._require_same()
        return self._nothing if unmounted else self._objects
