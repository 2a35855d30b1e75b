#!/usr/bin/env python3
"""bench/compare runs every engine and tells what came of it: a table, a line of JSON with all runs, a plot. Engines that
compute the same must have said the same. An engine that cannot live under the memory limit dies as part of the result;
without the right to make a cgroup, the missing limit is told. Speeds are not checked."""

import json
import os
import pathlib
import sys
import xml.etree.ElementTree

import support

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
import memory_cage  # noqa: E402

MIB = 1 << 20
GEN = 12


def compare(paths, name, model, *options):
    results = paths.folder / f"{name}.jsonl"
    svg = paths.folder / f"{name}.svg"
    done = support.run_ok(
        [sys.executable, "-B", paths.compare, "-m", model, "--build", paths.sluice.parent, "--llama-bin", paths.llama_bin,
         "-r", 1, "-n", GEN, "-c", 512, "--prompt-chars", 600, "--results", results, "--svg", svg, *options],
        support.clean_environment(GOMP_SPINCOUNT=1000))
    lines = results.read_text().splitlines()
    return done, lines, json.loads(lines[-1]), svg.read_text()


def can_cage():
    try:
        memory_cage.Cage(64 * MIB, "sluice-e2e").remove()
        return True
    except memory_cage.CageError:
        return False


def check_record(checks, record, names):
    checks.equal("engines", [engine["engine"] for engine in record["engines"]], names)
    for key in ("when", "program", "processor", "threads", "drive", "model", "model_bytes", "budget", "limit_bytes", "cgroup",
                "cold", "notes", "environment"):
        checks.that(key in record, f"no {key} in the record")
    checks.that("commit" in record["program"], f"no commit in {record['program']}")
    for engine in record["engines"]:
        for run in engine["runs"]:
            what = engine["engine"]
            if not checks.equal(f"{what}: outcome", run["outcome"], "done"):
                continue
            checks.that(run["prompt_rate"] > 0 and run["answer_rate"] > 0, f"{what}: {run}")
            checks.equal(f"{what}: answer tokens", run["answer_tokens"], GEN - 1)  # the first is the prompt's
            checks.that(run["peak_rss_bytes"] > MIB and run["seconds"] > 0, f"{what}: {run}")
            if what != "default":  # whose repacked kernels round otherwise
                checks.equal(f"{what}: same answer", run["same_answer"], True)
    tokens = {run["prompt_tokens"] for engine in record["engines"] for run in engine["runs"] if run["outcome"] == "done"}
    checks.equal("numbers of prompt tokens", len(tokens), 1)


def test(paths, checks):
    names = ["mapped", "default", "plugin", "plugin-read", "sluice"]
    done, lines, record, svg = compare(paths, "free", paths.model)
    check_record(checks, record, names)
    rows = [line for line in done.out.splitlines() if line.startswith("| s")]
    checks.equal("rows of the table", len(rows), len(names))
    checks.that("1 repetitions: fewer than the 5" in done.out, f"one repetition is not marked: {done.out}")
    root = xml.etree.ElementTree.fromstring(svg)
    bars = root.findall("{http://www.w3.org/2000/svg}rect")
    checks.equal("bars of the plot", len(bars) - 1, 2 * len(names))  # and the background
    checks.equal("records", len(lines), 1)
    _, lines, _, _ = compare(paths, "free", paths.model, "--engines", "sluice")
    checks.equal("records after a second call", len(lines), 2)

    # All experts are asked to stay in twice the memory that there is. They are anonymous, so the kernel kills at once; a
    # mapped engine would not die but read the same pages for minutes.
    large = paths.folder / "large.gguf"
    support.run_ok([paths.make_model, "--tokenizer", paths.model, "--layers", 4, "--width", 512, "--ff", 512, "--experts", 64,
                    "--type", "q8_0", "--out", large])
    done, _, record, svg = compare(paths, "caged", large, "--limit", "100MiB", "--budget", "100%", "--fit", "off", "--engines", "sluice",
                                   "--timeout", 120)
    if can_cage():
        checks.that(record["cgroup"] in (1, 2) and record["limit_bytes"] == 100 * MIB, f"no cgroup: {record}")
        checks.equal("all experts in 100 MiB", record["engines"][0]["runs"][0]["outcome"], "killed, out of memory")
        checks.that("1 of 1 killed" in done.out and "1 of 1 killed" in svg, f"its death is not told: {done.out}")
    else:
        checks.that("no memory limit" in done.err and any("no memory limit" in note for note in record["notes"]),
                    f"nothing says that there was no limit: {done.told()}")
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            checks.that(not can_cage(), "a user without rights makes a cgroup")
        finally:
            os.seteuid(0)

    for options, wanted in ((["-m", "none.gguf"], "none.gguf"), (["-m", paths.model, "--engines", "other"], "other"),
                            (["-m", paths.model, "--engines", "pack"], "--pack")):
        done = support.run([sys.executable, "-B", paths.compare, "--build", paths.sluice.parent, *options])
        checks.that(done.code == 2 and wanted in done.err and len(done.err.splitlines()) == 1, f"compare {options}: {done.told()}")


if __name__ == "__main__":
    support.main(test, "compare", "sluice", "plugin", "make-model", "llama-bin", "model")
