#!/usr/bin/env python3
"""Guards against a start that fails, and against paths that drift apart, where the system gives less than we ask for.

io_uring refused by a container's rules, at setup, at the first use, or only when files and buffers are registered; no
locked memory (without CAP_IPC_LOCK, for root passes otherwise); no huge pages; a small address space; few descriptors. Where nothing was
demanded: the same tokens and counters by way of the other path, one line with reason and remedy. Demanded by name:
refused at start. The plugin falls back too and never ends its host.
"""

import ctypes
import itertools
import resource

import generation
import support

CAP_IPC_LOCK = 14
PR_CAPBSET_DROP = 24
GIB = 1 << 30
# (what is denied, words of the line)
DENIALS = [
    ("io_uring_setup=EPERM", ["Operation not permitted", "allow io_uring"]),
    ("io_uring_setup=ENOSYS", ["Function not implemented", "Linux 5.6"]),
    ("io_uring_enter=EPERM", ["Operation not permitted", "allow io_uring"]),
]


def no_locked_memory(limit_bytes):
    # Loaded here: after the fork it is too late for that.
    libc = ctypes.CDLL(None, use_errno=True)

    def limit():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit_bytes, limit_bytes))
        libc.prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)

    return limit


def limited(kind, value):
    return lambda: resource.setrlimit(kind, (value, value))


def test(paths, checks):
    def run(*flags, denied=None, **options):
        before = [paths.deny, denied, "--"] if denied else []
        return generation.generate(paths, paths.model, *flags, before=before, **options)

    plain = run("--io", "io_uring")
    if plain.tokens is None:
        raise support.Skip(f"no io_uring here: {plain.done.told()}")

    # Every path, with every way to read: the same tokens, the same counters.
    for io, direct, verify in itertools.product(("io_uring", "pread"), ("on", "off"), (False, True)):
        what = f"--io {io} --direct {direct}{' --verify-slots' if verify else ''}"
        given = run("--io", io, "--direct", direct, *(["--verify-slots"] if verify else []))
        checks.equal(f"{what}: tokens", given.tokens, plain.tokens)
        if given.stats:
            checks.equal(f"{what}: path", (given.stats["io"]["path"], given.stats["io"]["direct"]), (io, direct == "on"))
            if direct == "on":
                checks.equal(f"{what}: counters", given.counters, plain.counters)
                checks.equal(f"{what}: reads", given.stats["io"]["reads"], plain.stats["io"]["reads"])

    for denied, words in DENIALS:
        given = run(denied=denied)
        if given.done.code == 77:
            raise support.Skip("the kernel takes no seccomp filter")
        if generation.check_same(checks, denied, given, plain):
            checks.equal(f"{denied}: path", given.stats["io"]["path"], "pread")
        checks.equal(f"{denied}: lines", len(given.lines), 1)
        generation.check_one_line(checks, denied, given, "pool of threads", *words)
        given = run("--io", "io_uring", denied=denied)
        checks.that(given.done.code == 1, f"{denied}, --io io_uring: {given.done.told()}; wanted exit 1")
        generation.check_one_line(checks, f"{denied}, --io io_uring", given, *words)
        done = support.run([paths.deny, denied, "--", paths.llama_bin / "llama-bench", "-m", paths.model, "-p", "16",
                            "-n", "2", "-r", "1", "-t", "1", "--repack", "0"],
                           support.plugin_environment(paths.plugin, SLUICE_BUDGET="10%"))
        checks.that(done.code == 0 and "pool of threads" in done.err, f"{denied}, plugin: {done.told()}")
        done = support.run(done.command, support.plugin_environment(paths.plugin, SLUICE_IO="io_uring"))
        lines = [line for line in done.err.splitlines() if line.startswith("sluice:") and words[0] in line]
        checks.that(done.signal == 0 and done.code != 0, f"{denied}, plugin, io_uring demanded: {done.told()}")
        checks.equal(f"{denied}, plugin, io_uring demanded: lines {lines}", len(lines), 1)

    given = run("-v", denied="io_uring_register=ENOMEM")
    if generation.check_same(checks, "nothing can be registered", given, plain):
        checks.equal("nothing can be registered: path", given.stats["io"]["path"], "io_uring")
    generation.check_one_line(checks, "nothing can be registered", given, "registers no files")

    # The bundled model's experts are small and go through staging, which would be registered. With no locked memory at
    # all some kernels refuse the ring itself.
    given = run("-v", preexec=no_locked_memory(64 << 10))
    if generation.check_same(checks, "64 KiB of locked memory", given, plain):
        checks.equal("64 KiB of locked memory: path", given.stats["io"]["path"], "io_uring")
    generation.check_one_line(checks, "64 KiB of locked memory", given, "not registered", "of locked memory",
                              "the limit (ulimit -l) is 64.0 KiB")
    given = run("-v", preexec=no_locked_memory(0))
    generation.check_same(checks, "no locked memory", given, plain)
    generation.check_one_line(checks, "no locked memory", given, "locked memory", "ulimit -l")
    # A kernel without transparent huge pages. Only a pool that would be in huge pages says so.
    large = run("-v", budget="8MiB")
    given = run("-v", denied="madvise=EINVAL", budget="8MiB")
    if generation.check_same(checks, "no huge pages", given, large):
        generation.check_one_line(checks, "no huge pages", given, "small pages", "huge pages are")
    given = run(preexec=limited(resource.RLIMIT_NOFILE, 24))
    generation.check_same(checks, "24 descriptors", given, plain)
    given = run("-q", preexec=limited(resource.RLIMIT_AS, GIB))
    generation.check_same(checks, "1 GiB of address space", given, plain)
    given = run("-q", preexec=limited(resource.RLIMIT_AS, GIB // 16))
    checks.that(given.done.signal == 0 and given.done.code in (1, 127),
                f"64 MiB of address space: {given.done.told()}; wanted a refusal")


if __name__ == "__main__":
    support.main(test, "sluice", "plugin", "deny", "llama-bin", "model")
