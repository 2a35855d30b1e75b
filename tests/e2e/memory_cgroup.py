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
import sys

import support

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
import memory_cage  # noqa: E402

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


def forget_cached(path):
    """Empties the page cache of a file: pages that are there already would count for whoever read them first."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make_cage(limit):
    try:
        return memory_cage.Cage(limit, "sluice-e2e")
    except memory_cage.CageError as reason:
        raise support.Skip(str(reason)) from None


def test(paths, checks):
    make_cage(64 * MIB).remove()
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
        with make_cage(limit) as cage:
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

    done, kills = caged("sluice run with all experts", [*sluice_run("full", "100%"), "--fit", "off"])
    checks.that(done.signal == signal.SIGKILL and kills > 0, f"the limit of {limit} bytes stops nothing: {done.told()}")

    done, kills = caged("sluice run with all experts made to fit", sluice_run("fitted", "100%"))
    if checks.that(done.code == 0 and kills == 0, f"sluice run --budget 100% in {limit} bytes: {done.told()}"):
        checks.equal("made to fit: tokens", support.read_json(paths.folder / "fitted.tokens"), wanted)
        checks.that("does not fit into memory" in done.err, f"no line says that the budget was made smaller: {done.told()}")

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
