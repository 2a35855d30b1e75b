#!/usr/bin/env python3
"""Guards against answers from a file that is no longer the model, and against a bus error when it is cut.

While `sluice run` answers, its model is replaced by rename or deleted: it goes on with the file it opened and gives the
same tokens. Or it is cut, or rewritten in place: it ends with one line that says so and exit 1, on both I/O paths and
with direct I/O on and off.
"""

import json
import os
import shutil
import subprocess

import generation
import support

TOKENS = 150


def start(paths, model, *flags):
    tokens = paths.folder / "changed.json"
    tokens.unlink(missing_ok=True)
    command = generation.command(paths, model, "-q", "--tokens", tokens, *flags, tokens=TOKENS)
    process = subprocess.Popen([str(part) for part in command], env=support.clean_environment(),
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return process, tokens


def change_while_running(paths, checks, what, change, *flags):
    """(exit code, standard error, tokens) of a run whose model is changed after its first words."""
    model = paths.folder / "model.gguf"
    shutil.copyfile(paths.model, model)
    process, tokens = start(paths, model, *flags)
    try:
        first = os.read(process.stdout.fileno(), 1)
        checks.that(first != b"", f"{what}: it ended before anything could be changed")
        checks.that(process.poll() is None, f"{what}: too fast to be changed while it runs")
        change(model)
        _, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    model.unlink(missing_ok=True)
    return process.returncode, err.decode(errors="replace"), json.loads(tokens.read_text()) if tokens.exists() else None


def replace(model):
    other = model.with_suffix(".new")
    other.write_bytes(b"GGUF, but another one" * 1000)
    other.rename(model)


def cut(model):
    os.truncate(model, model.stat().st_size // 3)


def rewrite(model):
    with open(model, "r+b") as file:
        file.seek(model.stat().st_size // 2)
        file.write(bytes(model.stat().st_size // 2))


def test(paths, checks):
    wanted = generation.generate(paths, paths.model, tokens=TOKENS)
    if not checks.that(wanted.tokens is not None, f"unchanged: {wanted.done.told()}"):
        return
    for io, direct in (("io_uring", "on"), ("io_uring", "off"), ("pread", "on"), ("pread", "off")):
        flags = ["--io", io, "--direct", direct]
        probe = generation.generate(paths, paths.model, *flags, tokens=2)
        if probe.tokens is None:
            print(f"left out, not to be had here: {io}, --direct {direct}")
            continue
        for name, change in (("replaced", replace), ("deleted", os.unlink)):
            what = f"{name}, {io}, --direct {direct}"
            code, err, tokens = change_while_running(paths, checks, what, change, *flags)
            checks.that(code == 0, f"{what}: exit {code}: {err}")
            checks.equal(f"{what}: tokens", tokens, wanted.tokens)
        for name, change, words in (("cut", cut, ["model.gguf"]),
                                    ("rewritten", rewrite, ["model.gguf", "was written to"])):
            what = f"{name}, {io}, --direct {direct}"
            code, err, _ = change_while_running(paths, checks, what, change, *flags)
            checks.that(code == 1, f"{what}: exit {code}, wanted 1: {err}")
            checks.equal(f"{what}: lines of {err!r}", len(err.splitlines()), 1)
            for word in words:
                checks.that(word in err, f"{what}: '{word}' is not named: {err}")


if __name__ == "__main__":
    support.main(test, "sluice", "model")
