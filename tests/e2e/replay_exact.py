#!/usr/bin/env python3
"""A run's own trace, replayed with its policy and its number of slots, gives the run's hits and misses exactly: in all
and layer by layer, for three prompts, each at another budget and policy, one of them longer than its pool can hold."""

import json

import support


def test(paths, checks):
    text = (paths.model.parent / "heldout.txt").read_text()
    runs = (("short", "What is a lighthouse?", "25%", "lfru"), ("prose", text[:1500], "10%", "lru"), ("long", text[3000:9000], "3%", "lfu"))
    for name, prompt, budget, policy in runs:
        trace = paths.folder / f"{name}.trace"
        stats_path = paths.folder / f"{name}.json"
        done = support.run([paths.sluice, "run", "-m", paths.model, "--raw", "-p", prompt, "-n", "24", "--temp", "0", "--ignore-eos",
                            "-t", "1", "--budget", budget, "--policy", policy, "--trace", trace, "--stats", stats_path])
        checks.that(done.code == 0, f"{name}: {done.told()}")
        stats = json.loads(stats_path.read_text())
        done = support.run([paths.sluice, "replay", trace, "--slots", str(stats["slots"]), "--policy", policy, "--layers", "--json"])
        checks.that(done.code == 0, f"{name}: {done.told()}")
        report = json.loads(done.out)
        replayed = find(report, policy)
        for key in ("requests", "hits", "misses", "evictions", "unplaced"):
            checks.equal(f"{name}: {key}", replayed[key], stats["experts"][key])
        checks.that(stats["experts"]["evictions"] > 0, f"{name}: nothing was evicted, so nothing is shown")
        if name == "long":
            checks.that(stats["experts"]["unplaced"] > 0, f"{name}: everything fitted, so nothing is shown")


def find(report, policy):
    """The one entry of the policy that was asked for, wherever the report has it."""
    if isinstance(report, dict):
        if report.get("policy") == policy and "hits" in report:
            return report
        report = list(report.values())
    if isinstance(report, list):
        for value in report:
            found = find(value, policy)
            if found:
                return found
    return None


if __name__ == "__main__":
    support.main(test, "sluice", "model")
