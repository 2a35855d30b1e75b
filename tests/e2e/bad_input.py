#!/usr/bin/env python3
"""Bad models, flags, settings and paths: `sluice` says one line that names the fault, and fails as its help tells.

For each case: the exit code is the one wanted (1 failed, 2 usage), standard error is one line that starts with "sluice"
and contains the words that name the fault, nothing crashes or hangs, and no file is left behind. The plugin in an
unmodified tool: one line too, and the host ends with a failure instead of running without what was asked for.
"""

import json
import resource
import struct

import support

FAILED, USAGE = 1, 2
GIB = 1 << 30
TRUNCATIONS = 20
EXPERTS = b"blk.0.ffn_down_exps.weight"


class Case:
    def __init__(self, name, arguments, code, *words, **environment):
        self.name, self.arguments, self.code, self.words, self.environment = name, arguments, code, words, environment
        # So that a request for more than any machine has cannot take this one down.
        self.address_space_bytes = 8 * GIB

    def limit(self):
        resource.setrlimit(resource.RLIMIT_AS, (self.address_space_bytes, self.address_space_bytes))


def check_refused(paths, checks, case):
    folder = paths.folder / "work"
    folder.mkdir()
    environment = support.clean_environment(TMPDIR=folder, **case.environment)
    done = support.run([paths.sluice, *case.arguments], environment, timeout=120, cwd=folder,
                       preexec=case.limit)
    lines = done.err.splitlines()
    checks.that(done.signal == 0 and done.code == case.code, f"{case.name}: {done.told()}; wanted exit {case.code}")
    checks.that(len(lines) == 1, f"{case.name}: {len(lines)} lines, wanted one: {support.shortened(done.err)}")
    said = lines[0] if lines else ""
    checks.that(said.startswith("sluice"), f"{case.name}: no line of sluice's: {support.shortened(said)}")
    for word in case.words:
        checks.that(str(word) in said, f"{case.name}: '{word}' is not named: {support.shortened(said)}")
    left = sorted(path.name for path in folder.iterdir())
    checks.equal(f"{case.name}: files left behind", left, [])
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def check_model_refused(paths, checks, name, model, *words, commands=("run", "inspect")):
    arguments = {"run": ["run", "-m", model, "-p", "Hi", "-n", "2", "-t", "1"], "inspect": ["inspect", model]}
    for command in commands:
        case = Case(f"{command}, {name}", arguments[command], FAILED, *words)
        # Whatever a file says, reading its header takes little memory.
        case.address_space_bytes = GIB // 2
        check_refused(paths, checks, case)


def check_unreadable_models(paths, checks):
    bad = paths.folder / "bad.gguf"
    check_model_refused(paths, checks, "missing file", paths.folder / "missing.gguf", "missing.gguf", "No such file")
    check_model_refused(paths, checks, "folder", paths.folder, paths.folder, "a folder that is no pack")
    check_model_refused(paths, checks, "device", "/dev/zero", "/dev/zero", "not a regular file")
    for name, content in (("empty file", b""), ("text file", b"Once upon a time\n" * 100), ("zeros", bytes(100_000))):
        bad.write_bytes(content)
        check_model_refused(paths, checks, name, bad, bad)


def check_truncated_models(paths, checks, whole):
    header = whole.index(EXPERTS)  # somewhere in the list of tensors
    points = [1, 8, 23, 100, header // 2, header, header + 40, *(len(whole) * i // 13 for i in range(1, 13)),
              len(whole) - 1]
    checks.equal("points of truncation", len(set(points)), TRUNCATIONS)
    bad = paths.folder / "truncated.gguf"
    for point in points:
        bad.write_bytes(whole[:point])
        check_model_refused(paths, checks, f"cut to {point} bytes", bad, bad)


def crafted_headers(whole):
    """(name, header, commands): headers in which one field is wrong. The tensors' data is that of `whole`."""
    def field(anchor, skip, layout, value):
        at = whole.index(anchor) + len(anchor) + skip if anchor else skip
        return whole[:at] + struct.pack(layout, value) + whole[at + struct.calcsize(layout):]

    # After a tensor's name: u32 dimensions, u64 each of the three, u32 type, u64 offset. After a key: u32 type, value.
    huge = (1 << 63) - 1
    yield "magic", field(b"", 0, "4s", b"GGML"), ("run", "inspect")
    yield "version 0", field(b"", 4, "<I", 0), ("run", "inspect")
    yield "version 99", field(b"", 4, "<I", 99), ("run", "inspect")
    yield "version of the other byte order", field(b"", 4, ">I", 3), ("run", "inspect")
    yield "2^63 tensors", field(b"", 8, "<Q", huge), ("run", "inspect")
    yield "2^63 keys", field(b"", 16, "<Q", huge), ("run", "inspect")
    yield "key of 2^62 bytes", field(b"", 24, "<Q", 1 << 62), ("run", "inspect")
    yield "key of an unknown type", field(b"general.architecture", 0, "<I", 77), ("run", "inspect")
    yield "array of 2^62 texts", field(b"tokenizer.ggml.tokens", 8, "<Q", 1 << 62), ("run", "inspect")
    yield "no dimensions", field(EXPERTS, 0, "<I", 0), ("run", "inspect")
    yield "a million dimensions", field(EXPERTS, 0, "<I", 1_000_000), ("run", "inspect")
    yield "row of no elements", field(EXPERTS, 4, "<Q", 0), ("run", "inspect")
    yield "row that ends within a block", field(EXPERTS, 4, "<Q", 65), ("run", "inspect")
    yield "2^62 experts", field(EXPERTS, 20, "<Q", 1 << 62), ("run", "inspect")
    yield "unknown tensor type", field(EXPERTS, 28, "<I", 250), ("run", "inspect")
    yield "offset beyond the end", field(EXPERTS, 32, "<Q", 1 << 62), ("run", "inspect")
    yield "offset that is not aligned", field(EXPERTS, 32, "<Q", 33), ("run", "inspect")
    yield "two tensors of one name", whole.replace(b"blk.1.ffn_down_exps.weight", EXPERTS, 1), ("run", "inspect")
    # inspect only needs the tensors; what to make of the model is llama.cpp's to say.
    yield "unknown architecture", whole.replace(b"qwen3next", b"qwen9next"), ("run",)
    yield "no layers", field(b"qwen3next.block_count", 4, "<I", 0), ("run",)
    yield "a billion layers", field(b"qwen3next.block_count", 4, "<I", 1_000_000_000), ("run",)
    yield "more experts used than there are", field(b"qwen3next.expert_used_count", 4, "<I", 1_000_000), ("run",)


def check_crafted_headers(paths, checks, whole):
    bad = paths.folder / "crafted.gguf"
    for name, content, commands in crafted_headers(whole):
        checks.that(content != whole, f"{name}: nothing was changed")
        bad.write_bytes(content)
        check_model_refused(paths, checks, name, bad, bad, commands=commands)


def check_flags(paths, checks):
    def run(*flags):
        return ["run", "-m", paths.model, "-p", "Hi", "-n", "2", "-t", "1", *flags]

    nowhere = paths.folder / "nowhere" / "file"
    cases = [
        Case("budget below the smallest", run("--budget", "100000"), FAILED, "budget", "needed", "100000 bytes"),
        Case("budget 0", run("--budget", "0"), FAILED, "budget", "0 bytes"),
        Case("budget 1", run("--budget", "1"), FAILED, "budget", "1 bytes"),
        Case("budget abc", run("--budget", "abc"), USAGE, "budget", "abc"),
        Case("budget 101%", run("--budget", "101%"), USAGE, "budget", "101%"),
        Case("budget 0%", run("--budget", "0%"), USAGE, "budget", "0%"),
        Case("budget -5", run("--budget=-5"), USAGE, "budget", "-5"),
        Case("budget of nothing", run("--budget", ""), USAGE, "budget"),
        Case("budget beyond 64 bits", run("--budget", "99999999999GiB"), USAGE, "budget", "99999999999GiB"),
        Case("SLUICE_BUDGET=abc", run(), USAGE, "SLUICE_BUDGET", "abc", SLUICE_BUDGET="abc"),
        Case("SLUICE_IO=nonsense", run(), USAGE, "SLUICE_IO", "nonsense", SLUICE_IO="nonsense"),
        Case("--io nonsense", run("--io", "nonsense"), USAGE, "nonsense", "io_uring"),
        Case("--fused nonsense", run("--fused", "nonsense"), USAGE, "nonsense", "require"),
        Case("--io synthetic, verified", run("--io", "synthetic", "--verify-slots"), USAGE, "synthetic", "verify_slots"),
        Case("--direct nonsense", run("--direct", "nonsense"), USAGE, "nonsense"),
        Case("--policy nonsense", run("--policy", "nonsense"), USAGE, "nonsense", "lru"),
        Case("--log-level nonsense", run("--log-level", "nonsense"), USAGE, "nonsense"),
        Case("unknown flag", run("--bogus"), USAGE, "--bogus"),
        Case("unknown subcommand", ["bogus"], USAGE, "bogus"),
        Case("no subcommand", [], USAGE, "command"),
        Case("no model", ["run", "-p", "Hi"], USAGE, "--model"),
        Case("no model to inspect", ["inspect"], USAGE, "model"),
        Case("two models to inspect", ["inspect", paths.model, "another.gguf"], USAGE, "another.gguf"),
        Case("unknown flag of inspect", ["inspect", "--bogus", paths.model], USAGE, "--bogus"),
        Case("-n -5", run("-n", "-5"), USAGE, "--tokens-max", "-5"),
        Case("-n x", run("-n", "x"), USAGE, "--tokens-max", "x"),
        Case("-c 0", run("-c", "0"), USAGE, "--ctx", "0"),
        Case("-c beyond its range", run("-c", "99999999999"), USAGE, "--ctx", "99999999999"),
        Case("-c beyond any memory", run("-c", "1073741824"), FAILED, "1073741824"),
        Case("-c beyond any memory, budget given", run("-q", "-c", "1073741824", "--budget", "25%"), FAILED,
             "1073741824"),
        Case("-c smaller than the prompt", ["run", "-m", paths.model, "-p", "word " * 600, "-c", "256", "-t", "1"],
             FAILED, "-c", "256"),
        Case("-t 0", run("-t", "0"), USAGE, "--threads", "0"),
        Case("-t 100000", run("-t", "100000"), USAGE, "--threads", "100000"),
        Case("--temp x", run("--temp", "x"), USAGE, "--temp", "x"),
        Case("prompt and file", run("-f", paths.model), USAGE, "-p", "-f"),
        Case("empty prompt", ["run", "-m", paths.model, "--raw", "-p", "", "-t", "1"], FAILED, "prompt"),
        Case("missing prompt file", ["run", "-m", paths.model, "-f", nowhere], FAILED, nowhere),
        Case("folder as prompt file", ["run", "-m", paths.model, "-f", paths.folder], FAILED, paths.folder),
        Case("no folder for --stats", run("-q", "--stats", nowhere), FAILED, nowhere),
        Case("no folder for --tokens", run("-q", "--tokens", nowhere), FAILED, nowhere),
        Case("no folder for --logits", run("-q", "--logits", nowhere), FAILED, nowhere),
        Case("folder as --stats", run("-q", "--stats", paths.folder), FAILED, paths.folder),
    ]
    for case in cases:
        check_refused(paths, checks, case)


def check_smallest_budget(paths, checks):
    """inspect, run and the plugin name the same number; it is enough, and one byte less is not."""
    model = paths.folder / "small.gguf"
    support.run_ok([paths.make_model, "--tokenizer", paths.model, "--experts", "32", "--experts-used", "3", "--out",
                    model])
    inspected = support.run_ok([paths.sluice, "inspect", model, "--json"])
    smallest = json.loads(inspected.out)["budget_bytes_min"]
    flags = ["run", "-m", model, "--raw", "-p", "Hi", "-n", "2", "-t", "1", "-q", "--budget"]
    done = support.run([paths.sluice, *flags, smallest])
    checks.that(done.code == 0, f"the smallest budget that inspect tells, {smallest}: {done.told()}")
    check_refused(paths, checks, Case("one byte less than the smallest budget", [*flags, smallest - 1], FAILED,
                                      f"{smallest} bytes", f"{smallest - 1} bytes"))
    bench = [paths.llama_bin / "llama-bench", "-m", model, "-p", "16", "-n", "2", "-r", "1", "-t", "1", "--repack", "0"]
    done = support.run(bench, support.plugin_environment(paths.plugin, SLUICE_BUDGET=smallest))
    checks.that(done.code == 0, f"plugin with the smallest budget that inspect tells, {smallest}: {done.told()}")
    done = support.run(bench, support.plugin_environment(paths.plugin, SLUICE_BUDGET=smallest - 1))
    checks.that(done.code != 0 and f"{smallest} bytes" in done.err,
                f"plugin with a byte less than the smallest budget, {smallest}: {done.told()}")


def check_dense_model(paths, checks):
    """A model without experts is no fault: it runs, and one line says that nothing is streamed."""
    support.run_ok([paths.llama_bin / "test-llama-archs", "-a", "llama", "-o", paths.folder, "-s", "1"],
                   support.clean_environment(LD_PRELOAD=paths.register_cpu))
    model = paths.folder / "llama-dense.gguf"
    done = support.run([paths.sluice, "run", "-m", model, "--raw", "-p", "Hi", "-n", "2", "-t", "1"])
    checks.that(done.code == 0, f"run, dense model: {done.told()}")
    told = [line for line in done.err.splitlines() if line.startswith("sluice:")]
    checks.that(len(told) == 1 and "dense model" in told[0], f"run, dense model: {told}")
    done = support.run([paths.sluice, "inspect", model])
    checks.that(done.code == 0 and done.err == "", f"inspect, dense model: {done.told()}")


def check_plugin(paths, checks):
    bench = [paths.llama_bin / "llama-bench", "-m", paths.model, "-p", "16", "-n", "2", "-r", "1", "-t", "1",
             "--repack", "0", "-o", "csv"]

    def told(done):
        return [line for line in done.err.splitlines() if line.startswith("sluice")]

    # An unusable setting: one line, and the host cannot make a context.
    for name, value, words in (("SLUICE_BUDGET", "abc", ["abc"]), ("SLUICE_BUDGET", "101%", ["101%"]),
                               ("SLUICE_IO", "nonsense", ["nonsense", "io_uring"]),
                               ("SLUICE_FUSED", "nonsense", ["nonsense", "require"])):
        what = f"plugin, {name}={value}"
        done = support.run(bench, support.plugin_environment(paths.plugin, **{name: value}))
        checks.that(done.signal == 0 and done.code != 0, f"{what}: {done.told()}")
        checks.equal(f"{what}: lines", len(told(done)), 1)
        for word in [name, *words]:
            checks.that(any(word in line for line in told(done)), f"{what}: '{word}' is not named: {told(done)}")

    # A budget that cannot work: the host cannot make a context.
    for mode in ("mmap", "none"):
        for value in ("0", "1", "100000"):
            what = f"plugin, SLUICE_BUDGET={value}, {mode}"
            done = support.run([*bench, "-lm", mode], support.plugin_environment(paths.plugin, SLUICE_BUDGET=value))
            checks.that(done.signal == 0 and done.code != 0, f"{what}: {done.told()}")
            checks.equal(f"{what}: lines", len(told(done)), 1)
            for word in ("budget", "at least", f"{value} bytes"):
                checks.that(any(word in line for line in told(done)), f"{what}: '{word}' is not named: {told(done)}")

    # Not ours to answer for, but nobody's reason to crash.
    text = paths.folder / "text.so"
    text.write_text("no library\n")
    for path in (paths.folder / "missing.so", text):
        done = support.run(bench, support.plugin_environment(path))
        checks.that(done.code == 0, f"GGML_BACKEND_PATH={path.name}: {done.told()}")


def test(paths, checks):
    whole = paths.model.read_bytes()
    check_unreadable_models(paths, checks)
    check_truncated_models(paths, checks, whole)
    check_crafted_headers(paths, checks, whole)
    check_flags(paths, checks)
    check_smallest_budget(paths, checks)
    check_dense_model(paths, checks)
    check_plugin(paths, checks)


if __name__ == "__main__":
    support.main(test, "sluice", "plugin", "make-model", "register-cpu", "llama-bin", "model")
