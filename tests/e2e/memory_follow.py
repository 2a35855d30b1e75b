#!/usr/bin/env python3
"""The expert pool follows the memory that is left while a model runs, and the answer stays the same.

A run starts in a memory cgroup with room for its budget; while it answers, the limit is lowered by 30 %, in steps, each as
far as the kernel allows (with cgroup v1 a limit below what cannot be reclaimed is refused, and the pool is locked). The
run must give memory back by itself, or the limit would never be reached; it must end well and say what it says without
any limit. Two runs at once in one cgroup, each with an automatic budget, must both fit.

Needs    root, and a memory controller in which cgroups can be made.
"""

import json
import subprocess
import time

import memory_cgroup
import support

MIB = 1 << 20
BUDGET_BYTES = 192 * MIB
LAYERS, KV_HEADS, HEAD_DIM, CONTEXT = 8, 2, 64, 1024
SHAPE = ["--arch", "qwen3moe", "--layers", LAYERS, "--width", 512, "--ff", 512, "--experts", 128,
         "--experts-used", 8, "--heads", 8, "--kv-heads", KV_HEADS, "--head-dim", HEAD_DIM, "--type", "q4_K",
         "--seed", 6]
PROMPT = "The sea is a large body of water, and rivers are"
TOKENS = 700
LOWERED = 0.70
STEPS = 12


def test(paths, checks):
    memory_cgroup.make_cage(64 * MIB).remove()
    model = paths.folder / "model.gguf"
    support.run_ok([paths.make_model, "--tokenizer", paths.tokenizer, *SHAPE, "--out", model])
    shape = json.loads(support.run_ok([paths.sluice, "inspect", model, "--json"]).out)
    kv_bytes = 2 * 2 * LAYERS * CONTEXT * KV_HEADS * HEAD_DIM
    limit = shape["dense_bytes"] + kv_bytes + BUDGET_BYTES + 64 * MIB

    def command(name, budget, tokens=TOKENS):
        return [paths.sluice, "run", "-m", model, "--raw", "-p", PROMPT, "-n", tokens, "--ignore-eos", "--temp", 0,
                "-c", CONTEXT, "--ubatch", 64, "-t", 1, "--budget", budget, "-v",
                "--tokens", paths.folder / f"{name}.tokens", "--stats", paths.folder / f"{name}.stats"]

    def start(name, budget, cage, tokens=TOKENS):
        return subprocess.Popen([str(part) for part in command(name, budget, tokens)], stdin=subprocess.DEVNULL,
                                stdout=subprocess.DEVNULL, stderr=open(paths.folder / f"{name}.err", "w"),
                                env=support.clean_environment(), preexec_fn=cage.enter)

    def said(name):
        return (paths.folder / f"{name}.err").read_text()

    support.run_ok(command("free", BUDGET_BYTES))
    wanted = support.read_json(paths.folder / "free.tokens")
    free_stats = support.read_json(paths.folder / "free.stats")

    memory_cgroup.forget_cached(model)
    with memory_cgroup.make_cage(limit) as cage:
        process = start("caged", BUDGET_BYTES, cage)
        try:
            # The pool is taken at the start.
            deadline = time.monotonic() + 60
            while cage.usage_bytes() < BUDGET_BYTES and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            lowest = limit
            target = int(limit * LOWERED)
            step = (limit - target) // STEPS
            while lowest > target and process.poll() is None:
                try:
                    cage.set_limit(max(lowest - step, target))
                    lowest = max(lowest - step, target)
                except OSError:  # more is held than that: not yet
                    pass
                time.sleep(0.25)
            early = process.poll() is not None
            code = process.wait(timeout=300)
        finally:
            process.kill()
            process.wait()
        print(f"limit {limit / MIB:.0f} MiB lowered to {lowest / MIB:.0f} MiB, exit {code}, {cage.kills()} killed")
        checks.that(not early, f"the run ended before the limit was lowered to {target / MIB:.0f} MiB")
        checks.equal("lowest limit", lowest, target)
        checks.that(code == 0 and cage.kills() == 0, f"a run whose limit is lowered: exit {code}: {said('caged')[-500:]}")
    if code == 0:
        checks.equal("tokens", support.read_json(paths.folder / "caged.tokens"), wanted)
        stats = support.read_json(paths.folder / "caged.stats")
        checks.that(stats["memory"]["pool_bytes"] < free_stats["memory"]["pool_bytes"],
                    f"the pool has {stats['memory']['pool_bytes']} bytes at the end, as at the start")
        checks.that("the pool gives memory back" in said("caged"), f"no line says so: {said('caged')[-500:]}")

    # Two at once: the second sees what the first has taken.
    both = 2 * (shape["dense_bytes"] + kv_bytes) + 200 * MIB
    with memory_cgroup.make_cage(both + 512 * MIB) as cage:
        processes = []
        try:
            for name in ("first", "second"):
                processes.append(start(name, "auto", cage, tokens=200))
                deadline = time.monotonic() + 60
                while "streaming" not in said(name) and processes[-1].poll() is None and time.monotonic() < deadline:
                    time.sleep(0.05)
            codes = [process.wait(timeout=300) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        print(f"two at once: exit {codes}, peak {cage.peak_bytes() / MIB:.0f} MiB, {cage.kills()} killed")
        checks.that(codes == [0, 0] and cage.kills() == 0,
                    f"two runs at once: exit {codes}: {said('first')[-300:]} {said('second')[-300:]}")
    if codes == [0, 0]:
        for name in ("first", "second"):
            generated = support.read_json(paths.folder / f"{name}.tokens")["generated"]
            checks.equal(f"{name} of two: tokens", generated, wanted["generated"][:200])
        pools = [support.read_json(paths.folder / f"{name}.stats")["memory"]["pool_bytes"] for name in ("first", "second")]
        print(f"their pools: {pools[0] / MIB:.0f} and {pools[1] / MIB:.0f} MiB")


if __name__ == "__main__":
    support.main(test, "sluice", "make-model", "tokenizer")
