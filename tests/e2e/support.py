"""What the end-to-end tests share: paths as flags, runs of a program in a clean environment, checks that are collected.

A test calls main(test, 'sluice', 'model', ...): the names become the flags --sluice PATH, --model PATH, and test(paths,
checks) gets them with an empty temporary folder in paths.folder.

Exit     0 all checks held; 1 one did not, each told in a line; 77 skipped, with a line that says why.
Time     a run that takes longer than its timeout is killed and fails; nothing else depends on speed.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

SKIPPED = 77


class Skip(Exception):
    """The machine or the build lacks what the test needs."""


class Failed(Exception):
    """Nothing more can be checked."""


class Checks:
    """Collects what did not hold, so that one run of a test tells everything."""

    def __init__(self):
        self.held = 0
        self.failures = []

    def that(self, condition, text):
        if condition:
            self.held += 1
        else:
            self.failures.append(text)
            print(f"FAILED   {text}", flush=True)
        return bool(condition)

    def equal(self, what, given, wanted):
        return self.that(given == wanted, f"{what}: {shortened(given)}, wanted {shortened(wanted)}")


def shortened(value, length=300):
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}... ({len(text)} characters)"


class Finished:
    """A program that has ended. `code` is what a shell shows, so 128 + N for one that signal N killed."""

    def __init__(self, command, returncode, out, err):
        self.command = command
        self.signal = -returncode if returncode < 0 else 0
        self.code = 128 + self.signal if self.signal else returncode
        self.out = out
        self.err = err

    def told(self):
        """For a failure's text: how it ended, and the end of what it said."""
        how = f"killed by {signal.Signals(self.signal).name}" if self.signal else f"exit {self.code}"
        said = (self.err + self.out).strip().splitlines()[-6:]
        return f"{how}: " + " | ".join(line[:200] for line in said)


def clean_environment(**variables):
    """The caller's environment without settings of llama.cpp, ggml and sluice, and with `variables`."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LLAMA_", "GGML_", "SLUICE_"))
    }
    # Threads that wait for others would otherwise spin, which on a busy machine takes the CPU from those they wait for.
    environment["OMP_WAIT_POLICY"] = "passive"
    # ggml_abort would start a debugger for its backtrace.
    environment["GGML_NO_BACKTRACE"] = "1"
    environment.update({name: str(value) for name, value in variables.items()})
    return environment


def plugin_environment(plugin, **variables):
    """Makes an unmodified llama.cpp tool load the plugin."""
    return clean_environment(GGML_BACKEND_PATH=plugin, **variables)


def run(command, environment=None, timeout=300, stdin=None, cwd=None, preexec=None):
    """Runs a program to its end. Its output need not be valid UTF-8."""
    command = [str(part) for part in command]
    try:
        done = subprocess.run(
            command,
            env=clean_environment() if environment is None else environment,
            input=None if stdin is None else stdin.encode(),
            stdin=subprocess.DEVNULL if stdin is None else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=timeout,
            cwd=cwd,
            preexec_fn=preexec,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"not done after {timeout} s: {' '.join(command)}") from None
    out, err = (said.decode(errors="replace") for said in (done.stdout, done.stderr))
    return Finished(command, done.returncode, out, err)


def run_ok(command, environment=None, **options):
    """As run, for a step without which the test makes no sense."""
    done = run(command, environment, **options)
    if done.code != 0:
        raise Failed(f"{' '.join(done.command)}: {done.told()}")
    return done


def read_json(path):
    try:
        return json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise Failed(f"{path}: {error}") from None


def check_streamed(checks, what, stats_path, model):
    """A statistics file of a run that must have been short of slots."""
    if not checks.that(pathlib.Path(stats_path).is_file(), f"{what}: no statistics were written"):
        return
    stats = read_json(stats_path)
    experts = stats["experts"]
    if not checks.that(stats["streaming"], f"{what}: the statistics tell of no streaming"):
        return
    checks.that(experts["requests"] > 0, f"{what}: no expert was asked for")
    checks.that(experts["evictions"] > 0, f"{what}: nothing was evicted")
    checks.equal(f"{what}: hits and misses", experts["hits"] + experts["misses"], experts["requests"])
    checks.equal(f"{what}: read errors", stats["io"]["errors"], 0)
    checks.equal(f"{what}: model", stats["model"], str(model))


def main(test, *names):
    parser = argparse.ArgumentParser(description=sys.modules[test.__module__].__doc__)
    for name in names:
        parser.add_argument(f"--{name}", required=True, type=lambda text: pathlib.Path(text).resolve(), metavar="PATH")
    paths = parser.parse_args()
    checks = Checks()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-e2e-"))
    paths.folder = folder
    try:
        for name in names:
            path = getattr(paths, name.replace("-", "_"))
            if not path.exists():
                raise Skip(f"no {name} at {path}")
        test(paths, checks)
    except Skip as reason:
        print(f"skipped: {reason}")
        sys.exit(SKIPPED)
    except Failed as reason:
        checks.that(False, str(reason))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{checks.held} checks held, {len(checks.failures)} did not")
    sys.exit(1 if checks.failures else 0)
