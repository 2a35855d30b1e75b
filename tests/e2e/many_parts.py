#!/usr/bin/env python3
"""Guards against split models that are read by halves, or that run out of descriptors.

One model whole, in 3 parts and in 60, so that one layer's experts lie in several files: the same tokens and counters,
also with 64 descriptors, when started from part 2, and under the plugin. With 32 descriptors and no right to more: it
runs, or one line names the limit. A missing part, a part of another model and glued parts are refused by name.
"""

import resource
import shutil

import generation
import support

MAKE = ["--experts", "16", "--experts-used", "2", "--layers", "6", "--ff", "128"]


def descriptors(soft, hard):
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def check_refused(paths, checks, what, model, *words):
    given = generation.generate(paths, model, "-q", budget="40%")
    checks.that(given.done.code == 1, f"{what}: {given.done.told()}; wanted exit 1")
    checks.equal(f"{what}: lines of {given.done.err!r}", len(given.done.err.splitlines()), 1)
    for word in words:
        checks.that(str(word) in given.done.err, f"{what}: '{word}' is not named: {given.done.err}")


def test(paths, checks):
    def make(name, *flags):
        folder = paths.folder / name
        folder.mkdir()
        support.run_ok([paths.make_model, "--tokenizer", paths.model, *MAKE, *flags, "--out", folder / "model.gguf"])
        return sorted(folder.iterdir())

    whole, = make("whole")
    wanted = generation.generate(paths, whole, budget="40%")
    if not checks.that(wanted.tokens is not None, f"whole: {wanted.done.told()}"):
        return
    for count in (3, 60):
        parts = make(f"in-{count}", "--split", count)
        checks.equal(f"{count} parts: files", len(parts), count)
        for what, model, preexec in ((f"{count} parts", parts[0], None), (f"{count} parts, part 2", parts[1], None),
                                     (f"{count} parts, 64 descriptors", parts[0], descriptors(64, 4096))):
            given = generation.generate(paths, model, budget="40%", preexec=preexec)
            if checks.that(given.tokens is not None, f"{what}: {given.done.told()}"):
                checks.equal(f"{what}: tokens", given.tokens, wanted.tokens)
                checks.that(given.stats["experts"]["evictions"] > 0, f"{what}: nothing was evicted")
        stats = paths.folder / f"plugin-{count}.json"
        done = support.run([paths.llama_bin / "llama-bench", "-m", parts[0], "-p", "16", "-n", "2", "-r", "1", "-t", "1",
                            "--repack", "0"],
                           support.plugin_environment(paths.plugin, SLUICE_BUDGET="40%", SLUICE_STATS=stats))
        if checks.that(done.code == 0, f"{count} parts, plugin: {done.told()}"):
            checks.equal(f"{count} parts, plugin: experts", support.read_json(stats)["expert_bytes"],
                         wanted.stats["expert_bytes"])

    given = generation.generate(paths, parts[0], "-q", budget="40%", preexec=descriptors(32, 32))
    if given.tokens is None:
        checks.that(given.done.code == 1 and "32" in given.done.err and "ulimit -n" in given.done.err,
                    f"32 descriptors: {given.done.told()}")
        checks.equal("32 descriptors: lines", len(given.done.err.splitlines()), 1)
    else:
        checks.equal("32 descriptors: tokens", given.tokens, wanted.tokens)

    parts = sorted((paths.folder / "in-3").iterdir())
    aside = paths.folder / "aside"
    shutil.move(parts[2], aside)
    check_refused(paths, checks, "part 3 is missing", parts[0], "part 3 of 3", parts[2].name)
    shutil.copyfile(make("other", "--split", "4")[2], parts[2])
    check_refused(paths, checks, "part of a model of 4", parts[0], parts[2].name)
    shutil.move(aside, parts[2])
    glued = paths.folder / "glued.gguf"
    glued.write_bytes(b"".join(part.read_bytes() for part in parts))
    check_refused(paths, checks, "glued parts", glued, glued)


if __name__ == "__main__":
    support.main(test, "sluice", "plugin", "make-model", "llama-bin", "model")
