#!/usr/bin/env python3
"""A model several times larger than the memory it may use answers, and answers the same, inside a memory cgroup.

The limit is what the model needs at all: dense weights, KV cache and the experts' budget, and 15 % for the program. The
model's file has more than four times that. `sluice run` and, with the plugin, unmodified llama-completion, which maps
the whole file, must live there; the same run with all experts in memory must not, which shows that the limit is real.

Needs    root, and a memory controller in which cgroups can be made (v1, or v2 with it enabled for children).
"""

import json
import os
import pathlib
import signal

import support

MIB = 1 << 20
BUDGET_BYTES = 128 * MIB
LAYERS, EXPERTS, KV_HEADS, HEAD_DIM, CONTEXT = 12, 160, 2, 64, 256
SHAPE = ["--arch", "qwen3moe", "--layers", LAYERS, "--width", 512, "--ff", 512, "--experts", EXPERTS,
         "--experts-used", 8, "--heads", 8, "--kv-heads", KV_HEADS, "--head-dim", HEAD_DIM, "--type", "q4_K",
         "--seed", 5]
PROMPT = "The sea is a large body of water, and rivers are"
TOKENS = 16
MARGIN = 1.15
TIMES_LARGER_MIN = 4


class Cage:
    """A memory cgroup with a limit and without swap, for one run; gone when left."""

    def __init__(self, limit_bytes):
        self.root, self.version = memory_controller()
        self.folder = self.root / f"sluice-e2e-{os.getpid()}"
        try:
            self.folder.mkdir()
            if self.version == 1:
                self.write("memory.swappiness", 0)
                self.write("memory.limit_in_bytes", limit_bytes)
            else:
                if (self.folder / "memory.swap.max").exists():
                    self.write("memory.swap.max", 0)
                self.write("memory.max", limit_bytes)
        except OSError as error:
            self.remove()
            raise support.Skip(f"no memory cgroup can be made: {error}") from None

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

    def field(self, file, key):
        return next((int(line.split()[1]) for line in self.read(file).splitlines() if line.split()[0] == key), 0)

    def peak_bytes(self):
        return int(self.read("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak") or 0)

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
        raise support.Skip("only root can make a memory cgroup")
    mounts = pathlib.Path("/proc/self/mountinfo")
    for line in mounts.read_text().splitlines() if mounts.exists() else []:
        before, _, after = line.partition(" - ")
        point, (kind, _, options) = pathlib.Path(before.split()[4]), after.split()[:3]
        if kind == "cgroup" and "memory" in options.split(","):
            return point, 1
        if kind == "cgroup2" and "memory" in (point / "cgroup.subtree_control").read_text().split():
            return point, 2
    raise support.Skip("no memory controller in which a cgroup could be made")


def forget_cached(path):
    """Empties the page cache of a file: pages that are there already would count for whoever read them first."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test(paths, checks):
    memory_controller()
    model = paths.folder / "large.gguf"
    support.run_ok([paths.make_model, "--tokenizer", paths.tokenizer, *SHAPE, "--out", model])
    inspected = support.run_ok([paths.sluice, "inspect", model, "--json"])
    shape = json.loads(inspected.out)
    kv_bytes = 2 * 2 * LAYERS * CONTEXT * KV_HEADS * HEAD_DIM  # keys and values, f16
    limit = int(MARGIN * (shape["dense_bytes"] + kv_bytes + BUDGET_BYTES))
    checks.that(shape["expert_bytes"] >= TIMES_LARGER_MIN * limit,
                f"the experts' {shape['expert_bytes']} bytes are no {TIMES_LARGER_MIN} times the limit of {limit}")
    print(f"experts {shape['expert_bytes'] / MIB:.0f} MiB, dense {shape['dense_bytes'] / MIB:.0f} MiB, "
          f"budget {BUDGET_BYTES / MIB:.0f} MiB, limit {limit / MIB:.0f} MiB")

    def sluice_run(name, budget):
        return [paths.sluice, "run", "-m", model, "--raw", "-p", PROMPT, "-n", TOKENS, "--ignore-eos", "--temp", 0,
                "-c", CONTEXT, "--ubatch", 64, "-t", 1, "--budget", budget,
                "--tokens", paths.folder / f"{name}.tokens", "--stats", paths.folder / f"{name}.stats"]

    def caged(name, command, environment=None):
        forget_cached(model)
        with Cage(limit) as cage:
            done = support.run(command, environment, preexec=cage.enter)
            print(f"{name}: exit {done.code}, peak {cage.peak_bytes() / MIB:.0f} MiB, "
                  f"limit met {cage.limit_hits()} times, {cage.kills()} killed")
            return done, cage.kills()

    support.run_ok(sluice_run("free", "100%"))
    wanted = support.read_json(paths.folder / "free.tokens")
    checks.equal("free run: tokens", len(wanted["generated"]), TOKENS)

    done, kills = caged("sluice run", sluice_run("caged", BUDGET_BYTES))
    if checks.that(done.code == 0 and kills == 0, f"sluice run in {limit} bytes: {done.told()}"):
        checks.equal("sluice run: tokens", support.read_json(paths.folder / "caged.tokens"), wanted)
        support.check_streamed(checks, "sluice run", paths.folder / "caged.stats", model)
        rss = support.read_json(paths.folder / "caged.stats")["memory"]["peak_rss_bytes"]
        checks.that(rss <= limit, f"sluice run: {rss} bytes at its peak, limit {limit}")

    done, kills = caged("sluice run with all experts", sluice_run("full", "100%"))
    checks.that(done.signal == signal.SIGKILL and kills > 0, f"the limit of {limit} bytes stops nothing: {done.told()}")

    stats = paths.folder / "plugin.stats"
    done, kills = caged(
        "llama-completion with the plugin",
        [paths.llama_bin / "llama-completion", "-m", model, "-no-cnv", "-p", PROMPT, "-n", TOKENS, "--ignore-eos",
         "--temp", 0, "-c", CONTEXT, "-ub", 64, "-t", 1, "--no-repack", "-fit", "off", "-lm", "mmap"],
        support.plugin_environment(paths.plugin, SLUICE_BUDGET=BUDGET_BYTES, SLUICE_STATS=stats))
    if checks.that(done.code == 0 and kills == 0, f"llama-completion in {limit} bytes: {done.told()}"):
        support.check_streamed(checks, "llama-completion", stats, model)


if __name__ == "__main__":
    support.main(test, "sluice", "plugin", "make-model", "llama-bin", "tokenizer")
