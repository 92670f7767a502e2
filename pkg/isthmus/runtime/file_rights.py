"""Say which right on a path the user of this process lacks, and which command gives it."""

import os
import pwd
import re
import shlex
import stat
from collections.abc import Iterable
from pathlib import Path

CAP_DAC_OVERRIDE = 1
"""The number of the capability in the kernel's bit masks."""


def why_denied(paths: Iterable[str], needs: int, *, writing: bool, place: Path | None = None) -> str:
    """Return which right this user lacks on the first of some paths that it may not use, and the command that gives it.

    Empty if owner and mode allow the use of all paths, or if they cannot be read. `needs`: rights on a path that
    exists, as bits such as os.R_OK; `writing`: whether the folder around it must be written as well; `place`: a folder
    that may be given to this user with all that is in it. Without one, the command gives the file and its folder alone.
    """
    try:
        for path in map(Path, map(os.path.abspath, paths)):
            if (found := _lacking(path, needs, writing=writing)) is not None:
                at, verb = found
                if verb.startswith("write") and os.statvfs(at).f_flag & os.ST_RDONLY:
                    return why_read_only(at)
                there = os.stat(at)
                if verb.startswith("write") and _mode_allows_writing(there):
                    return (
                        f"user {_name(os.geteuid())} may not {verb} {at}, though owner and mode allow it: if `lsattr "
                        f"-d {at}` shows an i, `sudo chattr -i {at}` allows it; else see the options of the mount, and "
                        "SELinux or AppArmor"
                    )
                owner, command = _name(there.st_uid), _command(at, verb, there.st_uid, place)
                taken = "chown" in command and there.st_uid not in (0, os.geteuid())
                instead = (
                    f"run this process as {owner}, too, or, if {owner} runs nothing of this run, " if taken else ""
                )
                me = _name(os.geteuid())
                # Files of a run are written by its processes: one that hides them from others goes on doing so.
                hidden = verb == "read" and stat.S_ISREG(there.st_mode) and there.st_uid != os.geteuid()
                again = f", but if {owner} runs a process of this run, start that as {me} first, or this comes again"
                return (
                    f"user {me} may not {verb} {at}, which is {owner}'s and has mode {stat.filemode(there.st_mode)}: "
                    f"{instead}`{command}` allows it{again if hidden else ''}"
                )
    except OSError:  # another process deletes or moves what is looked at
        pass
    return ""


def why_read_only(path: Path) -> str:
    """Return that a path is on a file system that is mounted read-only, and the command that changes it."""
    at = next(above for above in (path, *path.parents) if above.exists())
    mount, alone = _mount_of(at)
    why = "" if alone else ", as the kernel does after an error of the disk (dmesg names it)"
    how = "remount,bind,rw" if alone else "remount,rw"
    return (
        f"{at} is on a file system that is mounted read-only{why}: `sudo mount -o {how} {shlex.quote(str(mount))}` "
        "allows it"
    )


def _mode_allows_writing(there: os.stat_result) -> bool:
    """Return whether the mode lets this user write, or its capabilities do, which root in a container may lack."""
    if _overrides_modes():
        return True
    if there.st_uid == os.geteuid():
        return bool(there.st_mode & stat.S_IWUSR)
    of_group = there.st_gid in (os.getegid(), *os.getgroups())
    return bool(there.st_mode & (stat.S_IWGRP if of_group else stat.S_IWOTH))


def _overrides_modes() -> bool:
    """Return whether this process may use every file whatever its mode: root can, unless it lacks this capability."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return os.geteuid() == 0
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return os.geteuid() == 0 if found is None else bool(int(found[1], 16) >> CAP_DAC_OVERRIDE & 1)


def _mount_of(path: Path) -> tuple[Path, bool]:
    """Return the mount point that a path is below, and whether that mount alone is read-only, not its file system."""
    found = next(above for above in (path, *path.parents) if os.path.ismount(above)), False
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return found
    best = Path("/")
    for line in lines:
        mount, _, system = line.partition(" - ")
        words = mount.split(" ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[4]))
        if point in (path, *path.parents) and len(point.parts) >= len(best.parts):  # later ones lie above earlier ones
            best = point
            found = point, "ro" in words[5].split(",") and "ro" not in system.split(" ")[2].split(",")
    return found


def _lacking(path: Path, needs: int, *, writing: bool) -> tuple[Path, str] | None:
    """Return what this user may not do, as a path and a verb; None if owner and mode allow everything."""
    for above in reversed(path.parents):
        if os.path.exists(above) and not _may(above, os.X_OK):
            return above, "enter"
    if os.path.exists(path) and not _may(path, needs | (os.X_OK if path.is_dir() else 0)):
        return path, "write" if needs & os.W_OK else "read"
    folder = next(above for above in path.parents if os.path.exists(above))
    return (folder, "write in") if writing and not _may(folder, os.W_OK) else None


def _command(path: Path, verb: str, owner: int, place: Path | None) -> str:
    at, user = shlex.quote(str(path)), _name(os.geteuid())
    all_of = None if place is None else place.absolute()
    if owner == os.geteuid():
        return f"chmod u+rwX {at}"
    if verb == "enter" and (all_of is None or path in all_of.parents):
        return f"sudo chmod a+x {at}"
    if all_of is not None:
        give = f"chown -R {user}" if os.path.exists(all_of) else f"install -d -o {user}"
        return f"sudo {give} {shlex.quote(str(all_of))}"
    if verb == "write in":
        return f"sudo chown {user} {at}"
    around = "" if _may(path.parent, os.W_OK) else f"{shlex.quote(str(path.parent))} "
    return f"sudo chown {user} {around}{at}*"  # the star: SQLite keeps two more files beside a file


def _may(path: Path, needs: int) -> bool:
    return os.access(path, needs, effective_ids=os.access in os.supports_effective_ids)


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:  # a container may run as a user without a name
        return str(user)
