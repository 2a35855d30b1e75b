"""A memory cgroup with a limit and without swap, v1 or v2, for programs to run in; gone when left. Needs root and a
controller in which groups can be made: CageError says what is missing.

    with Cage(limit_bytes) as cage:
        subprocess.run(command, preexec_fn=cage.enter)
"""

import os
import pathlib


class CageError(Exception):
    """This machine, or this user, cannot make a memory cgroup."""


class Cage:
    def __init__(self, limit_bytes, name="sluice-cage"):
        self.root, self.version = memory_controller()
        self.folder = self.root / f"{name}-{os.getpid()}"
        try:
            self.folder.mkdir()
            if self.version == 1:
                self.write("memory.swappiness", 0)
            elif (self.folder / "memory.swap.max").exists():
                self.write("memory.swap.max", 0)
            self.set_limit(limit_bytes)
        except OSError as error:
            self.remove()
            raise CageError(f"no memory cgroup can be made: {error}") from None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.remove()

    def write(self, name, value):
        (self.folder / name).write_text(f"{value}\n")

    def read(self, name):
        try:
            return (self.folder / name).read_text()
        except OSError:  # not in every kernel
            return ""

    def enter(self):
        """In the child, between fork and exec."""
        self.write("cgroup.procs", os.getpid())

    def set_limit(self, limit_bytes):
        self.write("memory.limit_in_bytes" if self.version == 1 else "memory.max", limit_bytes)

    def field(self, file, key):
        return next((int(line.split()[1]) for line in self.read(file).splitlines() if line.split()[0] == key), 0)

    def peak_bytes(self):
        return int(self.read("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak") or 0)

    def usage_bytes(self):
        return int(self.read("memory.usage_in_bytes" if self.version == 1 else "memory.current") or 0)

    def kills(self):
        return self.field("memory.oom_control" if self.version == 1 else "memory.events", "oom_kill")

    def limit_hits(self):
        return int(self.read("memory.failcnt") or 0) if self.version == 1 else self.field("memory.events", "max")

    def remove(self):
        if self.folder.exists():
            self.folder.rmdir()


def memory_controller():
    """(mount point, version) of a memory controller that lets us make groups."""
    if os.geteuid() != 0:
        raise CageError("only root can make a memory cgroup")
    mounts = pathlib.Path("/proc/self/mountinfo")
    for line in mounts.read_text().splitlines() if mounts.exists() else []:
        before, _, after = line.partition(" - ")
        point, (kind, _, options) = pathlib.Path(before.split()[4]), after.split()[:3]
        if kind == "cgroup" and "memory" in options.split(","):
            return point, 1
        if kind == "cgroup2" and "memory" in (point / "cgroup.subtree_control").read_text().split():
            return point, 2
    raise CageError("no memory controller in which a cgroup could be made")
