#!/usr/bin/env python3
"""What users report of memory, containers and CPU quotas, as small runs: a budget that follows the host and not the
container, a context that was not in the sum, everything read before the first answer, a second copy of the experts in the
page cache, more threads than cores.

Needs    root for the cgroups; what cannot be made is skipped with a line.
"""

import ctypes
import json
import mmap
import os
import subprocess
import time

import memory_cgroup
import support

MIB = 1 << 20
# The kernel reads ahead of the dense tensors that are read through the page cache, into the experts between them.
READ_AHEAD_BYTES = 16 * MIB
PROMPT = "The sea is a large body of water, and rivers are"


def run_command(paths, name, model, *flags):
    return [paths.sluice, "run", "-m", model, "--raw", "--ignore-eos", "--temp", 0, "--stats",
            paths.folder / f"{name}.stats", *flags]


def check_small_container(paths, checks):
    """300 MiB, a long context, a prompt of more than 2,000 tokens, no budget given: never killed."""
    text = paths.folder / "long.txt"
    text.write_text((PROMPT + ". ") * 180)
    try:
        cage = memory_cgroup.make_cage(300 * MIB)
    except support.Skip as reason:
        print(f"no small container: {reason}")
        return
    with cage:
        done = support.run(run_command(paths, "small", paths.model, "-f", text, "-n", 16, "-c", 8192, "-t", 1, "-v"),
                           preexec=cage.enter)
        print(f"small container: exit {done.code}, peak {cage.peak_bytes() / MIB:.0f} MiB, {cage.kills()} killed")
        checks.that(done.code == 0 and cage.kills() == 0, f"small container: {done.told()}")
    if done.code == 0:
        stats = support.read_json(paths.folder / "small.stats")
        checks.that(stats["prefill"]["tokens"] >= 2000, f"the prompt has only {stats['prefill']['tokens']} tokens")
        checks.that(stats["budget_bytes"] < 300 * MIB, f"the budget is {stats['budget_bytes']}: that of the host?")
    for term in ("memory available", "dense weights", "context", "compute", "reserve", "budget"):
        checks.that(term in done.err, f"the sum does not tell '{term}': {done.told()}")


def check_too_small_container(paths, checks):
    """A context that cannot fit is refused before the model is loaded, with the sum."""
    try:
        cage = memory_cgroup.make_cage(64 * MIB)
    except support.Skip:
        return
    with cage:
        done = support.run(run_command(paths, "refused", paths.model, "-p", PROMPT, "-n", 4, "-c", 262144, "-t", 1),
                           preexec=cage.enter)
        checks.that(done.code == 1 and cage.kills() == 0 and "does not fit" in done.err,
                    f"a context that cannot fit: {done.told()}")


def present_bytes(path, ranges):
    """How much of the file's ranges is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE,
                                             flags=mmap.MAP_PRIVATE) as mapping:
        size = len(mapping)
        vector = (ctypes.c_ubyte * (-(-size // page)))()
        anchor = ctypes.c_char.from_buffer(mapping)
        code = libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), vector)
        del anchor
        if code != 0:
            raise support.Skip("mincore is not to be had")
    return sum(page * (vector[at // page] & 1) for begin, end in ranges for at in range(begin, end, page))


def check_nothing_is_read_before_it_is_needed(paths, checks):
    """Cold file, one token: dense weights and the experts that were asked for, nothing else; and no second copy."""
    model = paths.folder / "wide.gguf"
    support.run_ok([paths.make_model, "--tokenizer", paths.model, "--layers", 4, "--width", 256, "--ff", 256,
                    "--experts", 256, "--experts-used", 4, "--seed", 3, "--type", "q4_K", "--out", model])
    shape = json.loads(support.run_ok([paths.sluice, "inspect", model, "--json"]).out)
    size = model.stat().st_size
    command = [str(part) for part in run_command(paths, "cold", model, "-p", "Hi", "-n", 1, "-t", 1)]
    support.run_ok(command)  # the program itself is in memory then
    memory_cgroup.forget_cached(model)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               env=support.clean_environment())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    checks.equal("cold run", process.returncode, 0)
    stats = support.read_json(paths.folder / "cold.stats")
    read, needed = usage.ru_inblock * 512, size - shape["expert_bytes"] + stats["experts"]["bytes_read"]
    print(f"cold run: {read / MIB:.1f} MiB read of {size / MIB:.1f}, needed {needed / MIB:.1f}")
    checks.that(read <= needed + READ_AHEAD_BYTES, f"{read} bytes were read until the first token, {needed} were needed")

    if not stats["io"]["direct"]:
        print("no direct reads here: the page cache holds what was read")
        return
    memory_cgroup.forget_cached(model)
    support.run_ok(run_command(paths, "long", model, "-p", PROMPT, "-n", 200, "-t", 1, "--budget", "50%"))
    stats = support.read_json(paths.folder / "long.stats")
    cached = present_bytes(model, [(0, size)])
    checks.that(stats["experts"]["bytes_read"] > shape["expert_bytes"] / 4, "too few experts were read to see a copy")
    checks.that(cached <= size - shape["expert_bytes"] + READ_AHEAD_BYTES,
                f"{cached} bytes of the file are cached, of which the dense part has {size - shape['expert_bytes']}")


def check_threads_fit_the_cores(paths, checks):
    def threads(name, **options):
        done = support.run(run_command(paths, name, paths.model, "-p", PROMPT, "-n", 8), **options)
        if not checks.that(done.code == 0, f"{name}: {done.told()}"):
            return None
        return support.read_json(paths.folder / f"{name}.stats")["threads"]

    cores = sorted(os.sched_getaffinity(0))
    checks.equal("threads, one core that is not the first", threads(
        "masked", preexec=lambda: os.sched_setaffinity(0, {cores[-1]})), 1)
    folder = None
    for line in open("/proc/self/mountinfo", encoding="utf-8"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split()[:3]
        if kind == "cgroup" and "cpu" in options.split(","):
            folder = os.path.join(before.split()[4], f"sluice-e2e-{os.getpid()}")
    if folder is None or os.geteuid() != 0:
        print("no CPU quota can be set here")
        return
    try:
        os.mkdir(folder)
        with open(os.path.join(folder, "cpu.cfs_quota_us"), "w", encoding="utf-8") as file:
            file.write("100000")
    except OSError as error:
        print(f"no CPU quota can be set: {error}")
        if os.path.isdir(folder):
            os.rmdir(folder)
        return

    def enter():
        with open(os.path.join(folder, "cgroup.procs"), "w", encoding="utf-8") as file:
            file.write(str(os.getpid()))

    try:
        begin = time.monotonic()
        checks.equal("threads, quota of one CPU", threads("quota", preexec=enter), 1)
        print(f"with a quota of one CPU: {time.monotonic() - begin:.1f} s")
    finally:
        os.rmdir(folder)


def test(paths, checks):
    check_small_container(paths, checks)
    check_too_small_container(paths, checks)
    check_nothing_is_read_before_it_is_needed(paths, checks)
    check_threads_fit_the_cores(paths, checks)


if __name__ == "__main__":
    support.main(test, "sluice", "make-model", "model")
