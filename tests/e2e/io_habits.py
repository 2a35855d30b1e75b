#!/usr/bin/env python3
"""Guards against drives and file systems with odd habits (io_shim.cpp plays them, on the pread path).

Reads that return a part, that are interrupted, that may not be long: the same tokens and counters. EIO once: retried and
counted. EIO for good: one line with the file, the offset, the length and the error's meaning, not the word success, and
exit 1. Direct reads that are refused when opening, at every read, for addresses that are not on a page, or only for the
last block: buffered reads with one line, the same tokens; asked for by --direct on: refused. Experts are of sizes that
are no multiple of 512, so that the last block is a part of one.
"""

import generation
import support


def shimmed(paths, habits, **variables):
    return support.clean_environment(LD_PRELOAD=paths.shim, SHIM_HABITS=habits, **variables)


def run(paths, model, habits, *flags, **options):
    return generation.generate(paths, model, "--io", "pread", "-v", *flags, environment=shimmed(paths, habits),
                               budget="40%", **options)


def test(paths, checks):
    # q8_0 with an inner width of 96: slabs of 26112 bytes, and a file that ends within a block.
    model = paths.folder / "odd.gguf"
    support.run_ok([paths.make_model, "--tokenizer", paths.model, "--experts", "16", "--experts-used", "2", "--type",
                    "q8_0", "--ff", "96", "--out", model])
    with open(model, "ab") as file:
        # The padding behind the last tensor belongs to nobody: a file of any length is sound.
        file.truncate(model.stat().st_size // 512 * 512 - 32 if model.stat().st_size % 512 == 0 else
                      model.stat().st_size)
    size = model.stat().st_size
    checks.that(size % 512 != 0, f"the model has {size} bytes, which shows nothing about the last block")

    plain = generation.generate(paths, model, "--io", "pread", "--direct", "on", budget="40%")
    if plain.tokens is None:
        raise support.Skip(f"no direct I/O here: {plain.done.told()}")
    buffered = generation.generate(paths, model, "--io", "pread", "--direct", "off", budget="40%")
    checks.equal("buffered: tokens", buffered.tokens, plain.tokens)
    log = paths.folder / "log"
    generation.generate(paths, model, "--io", "pread", environment=shimmed(paths, "int_max", SHIM_LOG=log),
                        budget="40%")
    checks.that(log.exists() and int(log.read_text().split()[1]) > 100, "the shim sees no reads: it shows nothing")

    for habits in ("short", "eintr", "short,eintr", "int_max"):
        for direct, wanted in (("on", plain), ("off", buffered)):
            given = run(paths, model, habits, "--direct", direct)
            what = f"{habits}, --direct {direct}"
            if generation.check_same(checks, what, given, wanted):
                checks.equal(f"{what}: errors", given.stats["io"]["errors"], 0)
                checks.equal(f"{what}: interruptions counted", given.stats["io"]["retries"] > 0, "eintr" in habits)

    given = run(paths, model, "eio=60")
    if generation.check_same(checks, "EIO once", given, plain):
        checks.equal("EIO once: retries and errors", (given.stats["io"]["retries"], given.stats["io"]["errors"]), (1, 0))
    given = run(paths, model, "eio_for=60")
    checks.that(given.done.code == 1, f"EIO for good: {given.done.told()}; wanted exit 1")
    generation.check_one_line(checks, "EIO for good", given, str(model), "offset", "bytes", "Input/output error", "layer")
    checks.that("success" not in given.done.err.lower(), f"EIO for good: {given.done.told()}")

    for habits, reason in (("no_direct", "Invalid argument"), ("bad_direct", "Invalid argument"),
                           ("no_tail", "Invalid argument"), ("no_align,bad_direct", "Invalid argument")):
        given = run(paths, model, habits)
        if generation.check_same(checks, habits, given, buffered):
            checks.equal(f"{habits}: direct", given.stats["io"]["direct"], False)
        generation.check_one_line(checks, habits, given, "no direct I/O", reason, "page cache")
        given = run(paths, model, habits, "--direct", "on")
        checks.that(given.done.code == 1, f"{habits}, --direct on: {given.done.told()}; wanted exit 1")
        generation.check_one_line(checks, f"{habits}, --direct on", given, "direct I/O was asked for", reason)
    # The plugin: falls back as we do; what was demanded ends the tool instead of being kept in memory without a word.
    for mode in ("mmap", "none"):
        bench = [paths.llama_bin / "llama-bench", "-m", model, "-p", "16", "-n", "2", "-r", "1", "-t", "1", "--repack",
                 "0", "-lm", mode]
        for demanded in (False, True):
            what = f"plugin, {mode}, direct I/O {'demanded' if demanded else 'not to be had'}"
            stats = paths.folder / "plugin.json"
            environment = shimmed(paths, "bad_direct", GGML_BACKEND_PATH=paths.plugin, SLUICE_BUDGET="40%",
                                  SLUICE_IO="pread", SLUICE_STATS=stats, **({"SLUICE_DIRECT": "on"} if demanded else {}))
            done = support.run(bench, environment)
            lines = [line for line in done.err.splitlines() if line.startswith("sluice:") and "direct" in line]
            checks.that(done.signal == 0 and (done.code != 0) == demanded, f"{what}: {done.told()}")
            if demanded:
                checks.equal(f"{what}: lines {lines}", len(lines), 1)
                checks.that(all("was asked for" in line for line in lines), f"{what}: {lines}")
            else:
                checks.that(any("no direct I/O" in line for line in lines), f"{what}: {lines}")
                support.check_streamed(checks, what, stats, model)

    # A file system that wants whole pages, and says so not at all or wrongly.
    for habits in ("pages,no_align", "pages"):
        given = run(paths, model, habits)
        if checks.that(given.tokens is not None, f"{habits}: {given.done.told()}"):
            checks.equal(f"{habits}: tokens", given.tokens, plain.tokens)
            checks.equal(f"{habits}: direct", given.stats["io"]["direct"], True)


if __name__ == "__main__":
    support.main(test, "sluice", "plugin", "shim", "make-model", "llama-bin", "model")
