#!/usr/bin/env python3
"""Guards against a second drive that changes results, is not used, or is trusted without being looked at.

With a copy of the model in a mirror folder the tokens and counters are the same and both copies are read, in our program
and under the plugin. A copy with one flipped header byte, one that is cut, one that is missing (also one part of a split
model) and the model's own folder are refused at start with one line. A copy that is cut while the model runs is left.
"""

import shutil

import generation
import support


def check_both_read(checks, what, stats, folders):
    drives = stats["io"]["drives"]
    checks.equal(f"{what}: drives", [drive["path"] for drive in drives], [str(folder) for folder in folders])
    for drive in drives:
        checks.that(drive["reads"] > 0 and drive["bytes"] > 0, f"{what}: nothing was read from {drive['path']}")
        checks.equal(f"{what}: errors of {drive['path']}", (drive["errors"], drive["dropped"]), (0, False))
    checks.equal(f"{what}: reads of all drives", sum(drive["reads"] for drive in drives), stats["io"]["reads"])


def check_refused(paths, checks, what, model, folder, *words):
    given = generation.generate(paths, model, "-q", "--mirror", folder)
    checks.that(given.done.code == 1, f"{what}: {given.done.told()}; wanted exit 1")
    checks.equal(f"{what}: lines {given.lines}", len(given.done.err.splitlines()), 1)
    for word in ["mirror", *words]:
        checks.that(str(word) in given.done.err, f"{what}: '{word}' is not named: {given.done.told()}")


def test(paths, checks):
    mirror = paths.folder / "mirror"
    mirror.mkdir()
    copy = mirror / paths.model.name
    shutil.copyfile(paths.model, copy)
    home = paths.model.parent

    alone = generation.generate(paths, paths.model)
    if not checks.that(alone.tokens is not None, f"one drive: {alone.done.told()}"):
        return
    checks.equal("one drive: drives", alone.stats["io"]["drives"], [])
    for io in ("io_uring", "pread"):
        given = generation.generate(paths, paths.model, "--io", io, "--mirror", mirror)
        if generation.check_same(checks, f"mirror, {io}", given, alone):
            check_both_read(checks, f"mirror, {io}", given.stats, [home, mirror])
    given = generation.generate(paths, paths.model, environment=support.clean_environment(SLUICE_MIRROR=mirror))
    if generation.check_same(checks, "SLUICE_MIRROR", given, alone):
        check_both_read(checks, "SLUICE_MIRROR", given.stats, [home, mirror])
    third = paths.folder / "third"
    third.mkdir()
    shutil.copyfile(paths.model, third / paths.model.name)
    given = generation.generate(paths, paths.model, "--mirror", mirror, "--mirror", third)
    if generation.check_same(checks, "two mirrors", given, alone):
        check_both_read(checks, "two mirrors", given.stats, [home, mirror, third])

    stats = paths.folder / "plugin.json"
    done = support.run([paths.llama_bin / "llama-bench", "-m", paths.model, "-p", "16", "-n", "4", "-r", "1", "-t", "1",
                        "--repack", "0"],
                       support.plugin_environment(paths.plugin, SLUICE_MIRROR=mirror, SLUICE_BUDGET="10%",
                                                  SLUICE_STATS=stats))
    if checks.that(done.code == 0, f"plugin: {done.told()}"):
        check_both_read(checks, "plugin", support.read_json(stats), [home, mirror])

    whole = bytearray(paths.model.read_bytes())
    whole[1000] ^= 1
    copy.write_bytes(whole)
    check_refused(paths, checks, "flipped header byte", paths.model, mirror, copy, "byte 1000 differs")
    whole[1000] ^= 1
    copy.write_bytes(whole[:-1])
    check_refused(paths, checks, "cut copy", paths.model, mirror, copy, f"{len(whole) - 1} bytes", len(whole))
    copy.unlink()
    check_refused(paths, checks, "missing copy", paths.model, mirror, copy, "No such file")
    check_refused(paths, checks, "the model's own folder", paths.model, home, "not a copy")

    parts = paths.folder / "parts"
    parts.mkdir()
    support.run_ok([paths.make_model, "--tokenizer", paths.model, "--experts", "16", "--experts-used", "2", "--split",
                    "3", "--out", parts / "split.gguf"])
    names = sorted(parts.iterdir())
    for part in names:
        shutil.copyfile(part, mirror / part.name)
    alone = generation.generate(paths, names[0], budget="40%")
    given = generation.generate(paths, names[0], "--mirror", mirror, budget="40%")
    if generation.check_same(checks, "split model", given, alone):
        check_both_read(checks, "split model", given.stats, [parts, mirror])
    # The first part holds no experts' bytes, or few: it belongs to the copy all the same.
    (mirror / names[0].name).unlink()
    check_refused(paths, checks, "missing part", names[1], mirror, names[0].name, "No such file")


if __name__ == "__main__":
    support.main(test, "sluice", "plugin", "make-model", "llama-bin", "model")
