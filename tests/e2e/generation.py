"""One run of `sluice run` that chooses the likeliest tokens, with what it chose, what it said and what it counted."""

import json

import support

PROMPT = "A sluice is a gate that lets just enough water into the stream. The keeper of the sluice"
COUNTERS = ["requests", "hits", "misses", "loads", "evictions", "unplaced", "bytes_read"]


class Generation:
    def __init__(self, done, tokens, stats):
        self.done, self.tokens, self.stats = done, tokens, stats

    @property
    def counters(self):
        """What must be the same on every path: nothing here depends on a drive."""
        return {name: self.stats["experts"][name] for name in COUNTERS}

    @property
    def lines(self):
        """What the program itself said."""
        return [line for line in self.done.err.splitlines() if line.startswith("sluice:")]


def command(paths, model, *flags, tokens=24, budget="10%"):
    return [paths.sluice, "run", "-m", model, "--raw", "-p", PROMPT, "-n", tokens, "--ignore-eos", "--temp", "0",
            "-t", "1", "-c", "512", "--budget", budget, *flags]


def generate(paths, model, *flags, before=(), environment=None, tokens=24, budget="10%", **options):
    """`before`: what the program is started with, such as a launcher. Tokens are None when it failed."""
    tokens_path, stats_path = paths.folder / "tokens.json", paths.folder / "stats.json"
    for path in (tokens_path, stats_path):
        path.unlink(missing_ok=True)
    done = support.run([*before, *command(paths, model, "--tokens", tokens_path, "--stats", stats_path, *flags,
                                          tokens=tokens, budget=budget)],
                       environment, **options)
    if done.code != 0:
        return Generation(done, None, None)
    return Generation(done, json.loads(tokens_path.read_text()), json.loads(stats_path.read_text()))


def check_same(checks, what, given, wanted):
    """Tokens and counters are those of another run; and the budget was small enough to show anything."""
    if not checks.that(given.tokens is not None, f"{what}: {given.done.told()}"):
        return False
    checks.that(given.stats["experts"]["evictions"] > 0, f"{what}: nothing was evicted")
    same = checks.equal(f"{what}: tokens", given.tokens, wanted.tokens)
    return checks.equal(f"{what}: counters", given.counters, wanted.counters) and same


def check_one_line(checks, what, given, *words):
    """Exactly one line that has all of the words."""
    lines = [line for line in given.lines if all(word in line for word in words)]
    checks.equal(f"{what}: lines with {words} in {given.lines}", len(lines), 1)
