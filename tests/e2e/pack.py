#!/usr/bin/env python3
"""`sluice pack` and `sluice verify`, and packs in `sluice run` and in unmodified tools.

run        a pack computes what its GGUF computes, with one read for each miss instead of one for each matrix
plugin     llama-perplexity on a raw pack's model.gguf writes the logits of stock on the GGUF without repacking, on a native
           one's those of stock's default; without the plugin it prints nan; a pack that is not whole ends it in one line
pack       split, cut and fused sources; a full disk; Ctrl-C, SIGTERM and SIGKILL: a whole pack or nothing
verify     damage is named and the exit code tells it
"""

import ctypes
import ctypes.util
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import time

import support

EXPERTS, MODEL = "experts.sluice", "model.gguf"
KIB, MIB = 1 << 10, 1 << 20


class Model:
    """A pack or a GGUF as `sluice verify` and the format tell it: where things are."""

    # docs/pack-format.md: u32 layer, n_expert, n_matrix, n_segment; u64 offset, stride, read bytes.
    def __init__(self, experts):
        data = pathlib.Path(experts).read_bytes()
        self.data = data
        at = 4096
        tag_bytes, = struct.unpack_from("<I", data, at)
        at += 4 + tag_bytes + 8
        n_dense, = struct.unpack_from("<Q", data, at)
        at += 8 + 8 * n_dense
        n_layer, = struct.unpack_from("<I", data, at)
        at += 4
        self.layers = []
        for _ in range(n_layer):
            layer, n_expert, _n_matrix, n_segment, offset, stride, _read = struct.unpack_from("<IIIIQQQ", data, at)
            at += 40
            segments = {}
            for _ in range(n_segment):
                name_bytes, = struct.unpack_from("<I", data, at)
                name = data[at + 4:at + 4 + name_bytes].decode()
                at += 4 + name_bytes
                _type, _native, _ne0, _ne1, inside, size = struct.unpack_from("<IIQQQQ", data, at)
                at += 40
                segments[name] = (inside, size)
            at += 8 * n_expert * n_segment
            self.layers.append((layer, n_expert, offset, stride, segments))

    def place(self, name, expert):
        """(offset, bytes) of an expert's slice of a tensor in the experts file."""
        for _layer, _n_expert, offset, stride, segments in self.layers:
            if name in segments:
                inside, size = segments[name]
                return offset + expert * stride + inside, size
        raise support.Failed(f"no {name} in the pack")


def flip(path, offset, bit=1):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bit]))


def overwrite(path, offset, content):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def xxh3(data):
    """The sum that packs have, from the library that sluice is built with."""
    name = ctypes.util.find_library("xxhash")
    if name is None:
        raise support.Skip("no libxxhash")
    function = ctypes.CDLL(name).XXH3_64bits
    function.restype = ctypes.c_uint64
    return function(ctypes.c_char_p(bytes(data)), ctypes.c_size_t(len(data)))


def change_tag(path, old, new):
    """Says that a native pack was made for another machine."""
    front = bytearray(path.read_bytes())
    at = front.index(old)
    front[at:at + len(old)] = new
    index_bytes, = struct.unpack_from("<Q", front, 48)
    struct.pack_into("<Q", front, 56, xxh3(front[4096:4096 + index_bytes]))
    struct.pack_into("<Q", front, 64, xxh3(front[:64]))
    overwrite(path, 0, front)


def copy_pack(source, target):
    shutil.rmtree(target, ignore_errors=True)
    # The holes stay holes.
    support.run_ok(["cp", "-r", "--sparse=always", source, target])
    return target


def make_model(paths, name, *flags):
    path = paths.folder / name
    # Flags and values take turns; a flag without a value has None.
    flags = {"--layers": "2", "--experts": "8", **dict(zip(flags[::2], flags[1::2]))}
    support.run_ok([paths.make_model, "--tokenizer", paths.model, "--out", path, *(part for flag in flags.items() for part in flag if part)])
    return path


def told(done):
    return [line for line in done.err.splitlines() if line.startswith("sluice")]


def check_refused(checks, what, done, *words, code=1):
    checks.that(done.signal == 0 and done.code == code, f"{what}: {done.told()}; wanted exit {code}")
    lines = done.err.splitlines()
    checks.that(len(lines) == 1 and lines[0].startswith("sluice"), f"{what}: wanted one line: {support.shortened(done.err)}")
    for word in words:
        checks.that(str(word) in done.err, f"{what}: '{word}' is not named: {support.shortened(done.err)}")


def check_run(paths, checks, packs):
    results = {}
    for name, model in (("GGUF", paths.model), ("pack", packs["raw"]), ("model.gguf", packs["raw"] / MODEL)):
        logits, tokens, stats = (paths.folder / f"run.{kind}" for kind in ("logits", "tokens", "json"))
        done = support.run_ok([paths.sluice, "run", "-m", model, "-t", "1", "-q", "--budget", "25%", "--temp", "0", "-n", "24",
                               "-p", "What is a sluice?", "--logits", logits, "--tokens", tokens, "--stats", stats])
        figures = support.read_json(stats)
        results[name] = {"text": done.out, "logits": logits.read_bytes(), "tokens": tokens.read_text(), "figures": figures}
        checks.that(figures["experts"]["evictions"] > 0, f"run, {name}: nothing was evicted")
        reads_per_miss = figures["io"]["reads"] / figures["experts"]["misses"]
        checks.equal(f"run, {name}: reads for each miss", reads_per_miss, 3 if name == "GGUF" else 1)
    for name in ("pack", "model.gguf"):
        for kind in ("text", "logits", "tokens"):
            checks.that(results[name][kind] == results["GGUF"][kind], f"run, {name}: other {kind} than with the GGUF")
    same_slots = results["pack"]["figures"]["slots"] == results["GGUF"]["figures"]["slots"]
    for name in ("pack", "model.gguf"):
        for count in ("requests", "hits", "misses", "evictions"):
            if same_slots or count == "requests":
                checks.equal(f"run, {name}: {count}", results[name]["figures"]["experts"][count], results["GGUF"]["figures"]["experts"][count])


def perplexity(paths, model, environment, *flags, chunks=2):
    """How llama-perplexity ended, and the bytes of its logits file."""
    logits = paths.folder / "perplexity.logits"
    logits.unlink(missing_ok=True)
    done = support.run([paths.llama_bin / "llama-perplexity", "-m", model, "-t", "1", "-fit", "off", "-f", paths.text, "-c", "128",
                        "--chunks", chunks, "--save-all-logits", logits, *flags], environment)
    return done, logits.read_bytes() if logits.is_file() else b""


def check_plugin_exact(paths, checks, packs):
    stock = {}
    for layout, flags in (("raw", ["--no-repack"]), ("native", [])):
        done, stock[layout] = perplexity(paths, paths.model, support.clean_environment(), *flags)
        checks.that(done.code == 0 and len(stock[layout]) > 100_000, f"stock, {flags}: {done.told()}")
    checks.that(stock["raw"] != stock["native"], "repacking makes no difference here, so native packs are not tested")
    runs = [("raw", mode, "25%") for mode in ("mmap", "none", "dio")]
    runs += [("native", "mmap", "25%"), ("native", "none", "25%"), ("native", "mmap", "100%"), ("raw", "mmap", "100%")]
    for layout, mode, budget in runs:
        what = f"plugin, {layout} pack, {mode}, {budget}"
        stats = paths.folder / "plugin.json"
        environment = support.plugin_environment(paths.plugin, SLUICE_BUDGET=budget, SLUICE_STATS=stats)
        done, logits = perplexity(paths, packs[layout] / MODEL, environment, "-lm", mode, *(["--no-repack"] if layout == "raw" else []))
        if not checks.that(done.code == 0, f"{what}: {done.told()}"):
            continue
        checks.that(logits == stock[layout], f"{what}: other logits than stock's")
        figures = support.read_json(stats)
        checks.equal(f"{what}: reads", figures["io"]["reads"], figures["experts"]["misses"])
        checks.equal(f"{what}: evictions at all", figures["experts"]["evictions"] > 0, budget != "100%")


def check_without_plugin(paths, checks, packs):
    for layout in ("raw", "native"):
        done, _ = perplexity(paths, packs[layout] / MODEL, support.clean_environment(), chunks=1)
        said = done.out + done.err
        checks.that("nan" in said, f"{layout} pack without the plugin: no nan in {support.shortened(said[-500:])}")
        checks.that(not re.search(r"Final estimate: PPL = [0-9]", said), f"{layout} pack without the plugin: a figure")


def check_plugin_refuses(paths, checks, packs, other):
    bad = paths.folder / "bad.pack"

    def replace_by_others():
        shutil.copy(other / EXPERTS, bad / EXPERTS)

    def flip_all(path):
        """In every expert of the first layer, so that the first one that is asked for shows it."""
        _layer, n_expert, offset, stride, segments = Model(path).layers[0]
        inside, _ = segments["blk.0.ffn_down_exps.weight"]
        for expert in range(n_expert):
            flip(path, offset + expert * stride + inside + 77)

    size = (packs["raw"] / EXPERTS).stat().st_size
    cases = [
        ("no experts file", lambda: (bad / EXPERTS).unlink(), {}, ["missing", EXPERTS]),
        ("experts of another pack", replace_by_others, {}, ["another pack"]),
        ("experts file cut by a byte", lambda: os.truncate(bad / EXPERTS, size - 1), {}, [EXPERTS, str(size - 1)]),
        ("flipped byte in a record", lambda: flip_all(bad / EXPERTS), {"SLUICE_VERIFY_READS": 1}, ["checksum", EXPERTS, "expert"]),
        ("native pack of another machine", lambda: change_tag(bad / EXPERTS, b"ggml ", b"else "), {},
         [EXPERTS, "'else ", "'ggml ", "pack the model again", "--layout native"]),
    ]

    bench = [paths.llama_bin / "llama-bench", "-m", bad / MODEL, "-p", "16", "-n", "0", "-r", "1", "-t", "1", "--repack", "0",
             "--no-warmup"]
    for name, change, variables, words in cases:
        copy_pack(packs["native" if "native" in name else "raw"], bad)
        change()
        for mode in ("mmap", "none"):
            what = f"plugin, {name}, {mode}"
            done = support.run([*bench, "-lm", mode], support.plugin_environment(paths.plugin, SLUICE_BUDGET="25%", **variables))
            checks.that(done.signal == 0 and done.code != 0, f"{what}: {done.told()}")
            lines = [line for line in told(done) if "is a pack of layout" not in line and "streaming" not in line]
            checks.equal(f"{what}: lines", len(lines), 1)
            for word in words:
                checks.that(all(word in line for line in lines), f"{what}: '{word}' is not named: {lines}")
        done = support.run([paths.sluice, "run", "-m", bad, "-t", "1", "-q", "-n", "2", "-p", "Hi"], support.clean_environment(**variables))
        checks.that(done.signal == 0 and done.code == 1 and len(told(done)) == 1, f"run, {name}: {done.told()}")
        for word in words:
            checks.that(word in done.err, f"run, {name}: '{word}' is not named: {support.shortened(done.err)}")
    shutil.rmtree(bad)


def pack(paths, *arguments, **options):
    return support.run([paths.sluice, "pack", *arguments], **options)


def check_sources(paths, checks):
    """Split, fused and separate sources; cut ones."""
    whole = make_model(paths, "whole.gguf", "--seed", "5")
    make_model(paths, "parts.gguf", "--seed", "5", "--split", "3")
    part = paths.folder / "parts-00002-of-00003.gguf"
    done = pack(paths, part)
    checks.that(done.code == 0, f"pack of three parts: {done.told()}")
    default = paths.folder / "parts.pack"
    checks.that(default.is_dir(), f"pack of three parts: no parts.pack: {sorted(path.name for path in paths.folder.iterdir())}")
    done = pack(paths, whole, paths.folder / "given")
    checks.that(done.code == 0, f"pack with a name: {done.told()}")
    # The parts have the same tensors in the same order, so the records are the same. Headers and ids are not.
    from_parts, from_whole = Model(default / EXPERTS), Model(paths.folder / "given" / EXPERTS)
    names = [name for layer in from_whole.layers for name in layer[4]]
    checks.equal("tensors of the parts' pack", [name for layer in from_parts.layers for name in layer[4]], names)
    for name in names:
        for expert in range(8):
            (at, size), (other, _) = from_parts.place(name, expert), from_whole.place(name, expert)
            checks.that(from_parts.data[at:at + size] == from_whole.data[other:other + size], f"parts' pack: {name} expert {expert} differs")
    logits = [run_logits(paths, model) for model in (whole, default, paths.folder / "given")]
    checks.that(logits[0] == logits[1] == logits[2], "packs of the whole and the split model compute something else")

    last = paths.folder / "parts-00003-of-00003.gguf"
    content = last.read_bytes()
    for name, size in (("a byte", len(content) - 1), ("mid-expert", len(content) * 2 // 3)):
        last.write_bytes(content[:size])
        for out in ([], [paths.folder / "cut"]):
            shutil.rmtree(default, ignore_errors=True)
            check_refused(checks, f"pack of parts cut by {name}", pack(paths, part, *out), last.name)
            checks.that(not default.exists() and not (paths.folder / "cut").exists(), f"pack of parts cut by {name}: an output")
            checks.equal("left behind", [path.name for path in paths.folder.glob("*.partial")], [])
    last.write_bytes(content)

    for name, flags in (("separate", []), ("fused", ["--fused-gate-up", None])):
        model = make_model(paths, f"{name}.gguf", "--arch", "qwen3next", *flags)
        done = pack(paths, model)
        checks.that(done.code == 0, f"pack of {name} gate and up: {done.told()}")
        checks.that(run_logits(paths, model) == run_logits(paths, model.with_suffix(".pack")), f"{name} gate and up: other logits")


def run_logits(paths, model):
    logits = paths.folder / "logits"
    support.run_ok([paths.sluice, "run", "-m", model, "--raw", "-p", "Hello", "-n", "4", "-t", "1", "-q", "--budget", "100%", "--temp", "0",
                    "--logits", logits])
    return logits.read_bytes()


def check_full_disk(paths, checks):
    if os.geteuid() != 0:
        print("not root: no small disk to fill")
        return
    model = make_model(paths, "large.gguf", "--layers", "4", "--experts", "16", "--width", "512", "--ff", "512")
    needed = model.stat().st_size
    disk = paths.folder / "disk"
    disk.mkdir()
    mounted = support.run(["mount", "-t", "tmpfs", "-o", f"size={needed // 2}", "tmpfs", disk])
    if mounted.code != 0:
        print(f"no small disk to fill: {mounted.err.strip()}")
        return
    try:
        check_refused(checks, "pack onto a disk that is too small", pack(paths, model, disk / "out"), "needs", "free", "bytes")
        checks.equal("left on the small disk", list(disk.iterdir()), [])
        # It was large enough when the run began. The bar of a terminal is not there, so reads are watched.
        support.run_ok(["mount", "-o", f"remount,size={needed * 3 // 2}", disk])
        filler = disk / "filler"
        with slow_pack(paths, model, disk / "out") as run:
            run.wait_for_partial()
            with open(filler, "wb") as file:
                try:
                    while True:
                        file.write(bytes(MIB))
                except OSError:
                    pass
            run.resume()
            code, said = run.end()
        checks.equal("disk that fills up meanwhile: exit", code, 1)
        for word in ("disk is full", "needs", "were written", "free now"):
            checks.that(word in said, f"disk that fills up meanwhile: '{word}' is not told: {support.shortened(said)}")
        checks.equal("left on the full disk", [path.name for path in disk.iterdir()], ["filler"])
    finally:
        support.run(["umount", disk])


class slow_pack:
    """`sluice pack` that is stopped (SIGSTOP) soon after it has begun to write, for as long as the test wants."""

    def __init__(self, paths, model, out):
        self.out = pathlib.Path(out)
        self.process = subprocess.Popen([str(part) for part in (paths.sluice, "pack", model, out)], env=support.clean_environment(),
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def wait_for_partial(self):
        partial = self.out.with_name(self.out.name + ".partial")
        end = time.monotonic() + 60
        while not (partial / MODEL).exists():
            if time.monotonic() > end or self.process.poll() is not None:
                raise support.Failed(f"no {partial.name} came: {self.process.poll()}")
        self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def end(self):
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said.decode(errors="replace")


def check_signals(paths, checks):
    model = make_model(paths, "slow.gguf", "--layers", "6", "--experts", "32", "--width", "512", "--ff", "512")
    out = paths.folder / "stopped.pack"
    partial = paths.folder / "stopped.pack.partial"
    for name, wanted in (("SIGINT", 130), ("SIGTERM", 143)):
        with slow_pack(paths, model, out) as run:
            run.wait_for_partial()  # it is stopped here, so the signal comes while there is work left
            run.process.send_signal(getattr(signal, name))
            run.resume()
            code, said = run.end()
        checks.equal(f"{name} in pack: exit", code, wanted)
        checks.that(len(said.splitlines()) == 1 and "stopped on request" in said, f"{name} in pack: {support.shortened(said)}")
        checks.that(not out.exists() and not partial.exists(), f"{name} in pack: something is left")
    with slow_pack(paths, model, out) as run:
        run.wait_for_partial()
        check_refused(checks, "a second pack meanwhile", pack(paths, model, out), "being written by another process")
        run.process.kill()
        run.end()
    checks.that(partial.exists() and not out.exists(), "SIGKILL in pack: wanted the partial folder alone")
    done = pack(paths, model, out)
    checks.that(done.code == 0 and out.is_dir() and not partial.exists(), f"pack after SIGKILL: {done.told()}")
    done = support.run([paths.sluice, "verify", out])
    checks.that(done.code == 0, f"verify after SIGKILL: {done.told()}")
    shutil.rmtree(out)
    model.unlink()


def check_verify(paths, checks, packs):
    def verify(what, path, code, *words):
        done = support.run([paths.sluice, "verify", path])
        checks.that(done.signal == 0 and done.code == code, f"verify, {what}: {done.told()}")
        for word in words:
            checks.that(str(word) in done.out, f"verify, {what}: '{word}' is not named: {support.shortened(done.out)}")
        return done

    verify("sound GGUF", paths.model, 0, "sound", "no checksums")
    for layout in ("raw", "native"):
        verify(f"sound {layout} pack", packs[layout], 0, "sound", "compared with their checksums")
    verify("sound model.gguf", packs["raw"] / MODEL, 0, "sound")

    bad = copy_pack(packs["raw"], paths.folder / "bad.pack")
    offset, size = Model(bad / EXPERTS).place("blk.1.ffn_up_exps.weight", 7)
    flip(bad / EXPERTS, offset + size // 2)
    verify("flipped byte in a record", bad, 1, "blk.1.ffn_up_exps.weight expert 7: differs from its checksum", f"{size} bytes at {offset}",
           "1 damaged")
    copy_pack(packs["raw"], bad)
    content = (bad / MODEL).read_bytes()
    name = b"\x12\0\0\0\0\0\0\0output_norm.weight"
    at = content.index(name) + len(name)
    n_dims, = struct.unpack_from("<I", content, at)
    tensor_offset, = struct.unpack_from("<Q", content, at + 4 + 8 * n_dims + 4)
    inspected = [line for line in support.run_ok([paths.sluice, "inspect", bad]).out.splitlines()]
    checks.that(inspected, "inspect of a pack says nothing")
    # The tensors' data begins where the first one of offset 0 does: found by its bytes in the GGUF.
    data_begin = data_offset(content)
    flip(bad / MODEL, data_begin + tensor_offset)
    verify("flipped byte in a dense tensor", bad, 1, "output_norm.weight: differs from its checksum", f"at {data_begin + tensor_offset}")
    shutil.rmtree(bad)

    # A GGUF has no checksums, but experts of 512 KiB and more show holes.
    model = make_model(paths, "verify.gguf", "--width", "512", "--ff", "1024", "--type", "f16")
    content = model.read_bytes()
    at = data_offset(content)
    name = b"blk.1.ffn_up_exps.weight"
    field = content.index(name) + len(name) + 4
    n_in, n_out, n_expert = struct.unpack_from("<QQQ", content, field)
    tensor_offset, = struct.unpack_from("<Q", content, field + 3 * 8 + 4)
    slab = n_in * n_out * 2
    expert = [at + tensor_offset + e * slab for e in range(n_expert)]
    verify("sound made-up GGUF", model, 0, "sound")
    overwrite(model, expert[3], bytes(slab))
    verify("expert of zeros", model, 1, f"blk.1.ffn_up_exps.weight expert 3: is all zeros ({slab} bytes at {expert[3]}")
    model.write_bytes(content)
    overwrite(model, expert[5] + 128 * KIB, bytes(256 * KIB))
    verify("hole in an expert", model, 1, "blk.1.ffn_up_exps.weight expert 5: has a stretch of zeros", expert[5] + 128 * KIB)
    model.write_bytes(content)
    overwrite(model, expert[2] + 1000, b"\xff\x7f")
    verify("value that is no number", model, 1, "blk.1.ffn_up_exps.weight expert 2: holds values that are no numbers")
    model.write_bytes(content)
    for start in expert:
        overwrite(model, start + slab - 256 * KIB, bytes(256 * KIB))
    verify("padded by a tool", model, 0, "sound", "padding")


def data_offset(content):
    """Where a GGUF's tensor data begins: behind the tensor table, aligned to 32."""
    n_tensor, n_key = struct.unpack_from("<QQ", content, 8)
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    at = 24

    def text_end(position):
        return position + 8 + struct.unpack_from("<Q", content, position)[0]

    def value_end(position, kind):
        if kind == 8:
            return text_end(position)
        if kind != 9:
            return position + sizes[kind]
        element, count = struct.unpack_from("<IQ", content, position)
        position += 12
        for _ in range(count if element == 8 else 0):
            position = text_end(position)
        return position if element == 8 else position + count * sizes[element]

    for _ in range(n_key):
        at = text_end(at)
        at = value_end(at + 4, struct.unpack_from("<I", content, at)[0])
    for _ in range(n_tensor):
        at = text_end(at)
        at += 4 + 8 * struct.unpack_from("<I", content, at)[0] + 4 + 8
    return (at + 31) // 32 * 32


def check_usage(paths, checks, packs):
    check_refused(checks, "unknown layout", pack(paths, paths.model, "--layout", "fast"), "raw", "native", "fast", code=2)
    check_refused(checks, "pack of a native pack", pack(paths, packs["native"], paths.folder / "again"), "start from the GGUF")
    check_refused(checks, "pack without a model", pack(paths), "model", code=2)
    check_refused(checks, "verify without a model", support.run([paths.sluice, "verify"]), "model", code=2)
    check_refused(checks, "verify of nothing", support.run([paths.sluice, "verify", paths.folder / "missing"]), "missing")


def test(paths, checks):
    packs = {layout: paths.folder / f"{layout}.pack" for layout in ("raw", "native")}
    for layout, folder in packs.items():
        support.run_ok([paths.sluice, "pack", paths.model, folder, "--layout", layout])
    other = make_model(paths, "other.gguf")
    support.run_ok([paths.sluice, "pack", other])
    check_run(paths, checks, packs)
    check_plugin_exact(paths, checks, packs)
    check_without_plugin(paths, checks, packs)
    check_plugin_refuses(paths, checks, packs, other.with_suffix(".pack"))
    check_sources(paths, checks)
    check_full_disk(paths, checks)
    check_signals(paths, checks)
    check_verify(paths, checks, packs)
    check_usage(paths, checks, packs)


if __name__ == "__main__":
    support.main(test, "sluice", "plugin", "make-model", "llama-bin", "model", "text")
