#!/usr/bin/env python3
"""`sluice bench` measures what it says: all prompt tokens that were asked for, never a prefix that the model's memory still
holds; a cold run starts with an empty pool and an uncached file, or says that it does not; a run says where its routing
is nobody's. Speeds are not checked."""

import mmap

import support

PROMPT, GEN, REPETITIONS = 96, 16, 2
PHASE_KEYS = {"tokens", "seconds", "tokens_per_second", "requests", "hits", "misses", "hit_rate", "loads", "evictions",
              "unplaced", "bytes_read", "time", "joules"}


def bench(paths, name, model, *options):
    json_path = paths.folder / f"{name}.json"
    done = support.run_ok([paths.sluice, "bench", "-m", model, "--prompt-tokens", PROMPT, "--gen-tokens", GEN,
                           "-r", REPETITIONS, "--json", json_path, *options],
                          support.clean_environment(GOMP_SPINCOUNT=1000))
    return done.out, support.read_json(json_path)


def by_state(report, budget):
    return {run["state"]: run for run in report["runs"] if run["budget"] == budget}


def check_figures(checks, name, table, report, budgets):
    checks.equal(f"{name}: runs", [(run["budget"], run["state"]) for run in report["runs"]],
                 [(budget, state) for budget in budgets for state in ("cold", "warm")])
    for key in ("program", "machine", "model", "architecture", "expert_bytes", "dense_bytes", "policy", "text", "routing",
                "reservations"):
        checks.that(key in report, f"{name}: no {key} in the JSON")
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    checks.equal(f"{name}: rows of the table", len(rows), len(report["runs"]))
    for run in report["runs"]:
        what = f"{name}, {run['budget']}, {run['state']}"
        checks.equal(f"{what}: repetitions", len(run["repetitions"]), REPETITIONS)
        checks.equal(f"{what}: path", run["io"]["path"] in ("io_uring", "pread"), True)
        for repetition in run["repetitions"]:
            for phase, tokens in (("prefill", PROMPT), ("decode", GEN)):
                figures = repetition[phase]
                checks.equal(f"{what}: keys of {phase}", set(figures), PHASE_KEYS)
                checks.equal(f"{what}: {phase} tokens", figures["tokens"], tokens)
                checks.equal(f"{what}: hits and misses", figures["hits"] + figures["misses"], figures["requests"])
                checks.that(figures["seconds"] > 0 and figures["requests"] > 0, f"{what}: {phase} did nothing")
                time = figures["time"]
                checks.that(abs(sum(time.values()) - figures["seconds"]) < 1e-6 and time["other_s"] >= 0,
                            f"{what}: the times of {phase} are no split of {figures['seconds']} s: {time}")
        for phase in ("prefill", "decode"):
            spread = run[phase]["tokens_per_second"]
            checks.that(0 < spread["min"] <= spread["median"] <= spread["max"], f"{what}: spread {spread}")


def test(paths, checks):
    budgets = ["25%", "100%"]
    table, first = bench(paths, "first", paths.model, "--budgets", ",".join(budgets))
    check_figures(checks, "first", table, first, budgets)
    checks.equal("text of the bundled model", first["text"],
                 {"source": str(paths.model.parent / "heldout.txt"), "random": False})
    checks.equal("the bundled model's routing", first["routing"]["verdict"], "uneven")
    checks.that("not representative" not in table, f"the bundled model is marked: {table}")
    for budget in budgets:
        cold, warm = by_state(first, budget)["cold"], by_state(first, budget)["warm"]
        for phase in ("prefill", "decode"):
            read = [run[phase]["bytes_read"]["median"] for run in (cold, warm)]
            if phase == "prefill" or budget == "100%":
                checks.that(read[0] >= read[1], f"{budget}: {phase} read {read[0]} bytes cold and {read[1]} warm")
        checks.that(all(one["prefill"]["hits"] == 0 for one in cold["repetitions"]), f"{budget}: cold, yet there were hits")
        checks.that(all(one["prefill"]["hits"] > 0 for one in warm["repetitions"]), f"{budget}: warm, yet there were no hits")
    evictions = [sum(one["decode"]["evictions"] for one in by_state(first, budget)["warm"]["repetitions"]) for budget in budgets]
    checks.that(evictions[0] > 0 and evictions[1] == 0, f"evictions at {budgets}: {evictions}")

    # A second call measures the same work, although the first one has left the file in whatever cache there is.
    _, second = bench(paths, "second", paths.model, "--budgets", ",".join(budgets))
    counts = [[[one[phase][key] for key in ("tokens", "requests", "hits", "bytes_read", "evictions")]
               for run in report["runs"] for one in run["repetitions"] for phase in ("prefill", "decode")]
              for report in (first, second)]
    checks.equal("counts of the second call", counts[1], counts[0])

    # Every window of this text begins with the same words: nothing of a prompt may be taken from the pass before.
    text = paths.folder / "same.txt"
    text.write_text("the " * 2000)
    _, same = bench(paths, "same", paths.model, "--budgets", "25%", "--text", text)
    passes = [one["prefill"] for run in same["runs"] for one in run["repetitions"]]
    checks.equal("tokens of equal prompts", [one["tokens"] for one in passes], [PROMPT] * (2 * REPETITIONS))
    requests = [one["requests"] for one in passes]
    checks.that(min(requests) > 0.9 * max(requests), f"equal prompts asked for {requests} experts")

    # The file is held in the page cache by someone else: then it is not cold, and bench says so.
    if all(run["file_cold"] for run in first["runs"] if run["state"] == "cold"):
        with open(paths.model, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            checks.that(sum(mapped[at] for at in range(0, len(mapped), mmap.PAGESIZE)) > 0, "an empty model")
            table, held = bench(paths, "held", paths.model, "--budgets", "25%")
        checks.equal("a file that is held: cold", by_state(held, "25%")["cold"]["file_cold"], False)
        checks.that("could not be made cold" in table and "cold pool, file cached" in table, f"a file that is held: {table}")
    else:
        checks.that("could not be made cold" in table, f"the file stayed in the cache, and nothing says so: {table}")

    even = paths.folder / "even.gguf"
    support.run_ok([paths.make_model, "--tokenizer", paths.model, "--out", even])
    table, report = bench(paths, "even", even, "--budgets", "50%", "--text", paths.model.parent / "heldout.txt")
    checks.equal("a made-up model's routing", report["routing"]["verdict"], "uniform")
    checks.that("NOTE: uniform routing: not representative" in table, f"a made-up model is not marked: {table}")
    table, report = bench(paths, "random", even, "--budgets", "50%")
    checks.equal("no text", report["text"], {"source": "random tokens", "random": True})
    checks.that("NOTE: random tokens: routing is not representative" in table, f"random tokens are not marked: {table}")

    for options, wanted in ((["--budgets", "x"], "--budgets"), (["--prompt-tokens", "0"], "--prompt-tokens"),
                            (["--prompt-tokens", "200000"], "tokens and"), (["--budgets", "0.001%"], "too small"),
                            (["--text", paths.folder / "none.txt"], "none.txt"),
                            (["--json", paths.folder / "none" / "x.json"], "x.json")):
        done = support.run([paths.sluice, "bench", "-m", paths.model, *options])
        checks.that(done.code in (1, 2) and wanted in done.err and len(done.err.splitlines()) == 1,
                    f"bench {options}: {done.told()}")


if __name__ == "__main__":
    support.main(test, "sluice", "make-model", "model")
