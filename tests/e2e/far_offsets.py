#!/usr/bin/env python3
"""Guards against offsets and sizes of 32 bits, signed or not.

A model of one layer whose expert tensors have more than 2 GiB each, so that the last one lies beyond 4 GiB, and whose
used experts are far apart in them; between them are holes, so the file takes little room. It must answer as the compact
model with the same few experts does, on every path, each slot compared with the file.
"""

import os

import generation
import gguf_edit
import support

GIB = 1 << 30
USED = 4  # experts with weights
COMPACT = 6  # the others are zeros with a zero row in the router
FAR = 1024
PLACES = [300, 700, 1000, 1023]  # where they lie among the many


def slab_of(tensor):
    return len(tensor.data) // tensor.shape[-1]


def write_compact(model, path):
    for tensor in model.tensors:
        if tensor.name.endswith(("_exps.weight", "ffn_gate_inp.weight")):
            slab = slab_of(tensor)
            tensor.data = tensor.data[:USED * slab] + bytes((COMPACT - USED) * slab)
    model.write(path)


def write_far(model, path):
    """The same experts at PLACES among FAR, in a file with holes."""
    slabs = {}
    for tensor in model.tensors:
        if tensor.name.endswith(("_exps.weight", "ffn_gate_inp.weight")):
            slabs[tensor.name] = slab_of(tensor)
            tensor.shape[-1] = FAR
    model.set_u32("qwen3moe.expert_count", FAR)
    sizes = [slabs[tensor.name] * FAR if tensor.name in slabs else len(tensor.data) for tensor in model.tensors]
    header = model.header(sizes)
    ends = []
    with open(path, "wb") as file:
        file.write(header)
        at = len(header)
        for tensor, size in zip(model.tensors, sizes):
            if tensor.name in slabs:
                slab = slabs[tensor.name]
                for number, place in enumerate(PLACES):
                    file.seek(at + place * slab)
                    file.write(tensor.data[number * slab:(number + 1) * slab])
                if tensor.name.endswith("_exps.weight"):
                    ends.append((size, at + PLACES[0] * slab))
            else:
                file.seek(at)
                file.write(tensor.data)
            at += model.padded(size)
        file.truncate(at)
    return ends


def test(paths, checks):
    made, compact, far = (paths.folder / name for name in ("made.gguf", "compact.gguf", "far.gguf"))
    support.run_ok([paths.make_model, "--tokenizer", paths.model, "--layers", "1", "--width", "2048", "--ff", "2048",
                    "--experts", COMPACT, "--experts-used", "2", "--type", "q4_0", "--dense-type", "q4_0", "--out", made])
    write_compact(gguf_edit.Gguf(made), compact)
    ends = write_far(gguf_edit.Gguf(compact), far)
    taken = far.stat().st_blocks * 512
    if taken > GIB:
        raise support.Skip(f"the file system makes no holes: {taken} bytes")
    checks.that(all(size > 2 * GIB for size, _ in ends), f"expert tensors of {[size for size, _ in ends]} bytes")
    checks.that(max(begin for _, begin in ends) > 4 * GIB, f"experts from {[begin for _, begin in ends]}")

    wanted = generation.generate(paths, compact, budget="100%", tokens=12)
    if not checks.that(wanted.tokens is not None, f"compact: {wanted.done.told()}"):
        return
    for io in ("io_uring", "pread"):
        for direct in ("auto", "off"):
            what = f"--io {io} --direct {direct}"
            given = generation.generate(paths, far, "--verify-slots", "--io", io, "--direct", direct, tokens=12,
                                        budget="64MiB")
            if given.tokens is None and io == "io_uring" and "io_uring" in given.done.err:
                print(f"left out, not to be had here: {what}")
                continue
            if checks.that(given.tokens is not None, f"{what}: {given.done.told()}"):
                checks.equal(f"{what}: tokens", given.tokens, wanted.tokens)
    os.truncate(far, far.stat().st_size - 4096)
    given = generation.generate(paths, far, "-q", budget="64MiB")
    checks.that(given.done.code == 1 and str(far) in given.done.err, f"cut by a block: {given.done.told()}")


if __name__ == "__main__":
    support.main(test, "sluice", "make-model", "model")
