#!/usr/bin/env python3
"""Guards against experts that are found, counted or chosen wrongly because of how a model stores them.

Table order   gpt-oss with bias and scale tensors first, last, reversed and shuffled: each as stock, all alike; the side
              tensors are listed and counted as resident.
Scales        every scale doubled, in a model whose experts have them: as stock, so applied once.
Gate and up   the same weights separate and fused into one tensor: the same logits, the same number of experts; shared
              experts are no routed ones.
Counts        2, 512, 513 and 1024 experts, one used and all used: as stock, or the same verdict. A model with one expert.
Groups        deepseek2 with a dense first layer, a shared expert, groups and a selection bias: as stock; groups that cannot
              be are refused; a trailing layer that is only announced: stock's verdict.
Override      --override-kv expert_used_count in a stock tool: the plugin's logits are stock's.
Bad routers   rows of NaN or infinity: no crash, no hang, no read outside the experts; our program and the plugin come to
              an end as stock does.
"""

import json
import math
import random
import struct

import gguf_edit
import support

SIDE = (".bias", ".scale")


def make(paths, name, *flags):
    path = paths.folder / f"{name}.gguf"
    support.run_ok([paths.make_model, "--tokenizer", paths.model, "--layers", "2", "--out", path, *flags])
    return path


def check_equal_to_stock(paths, checks, what, model, budgets="min"):
    done = support.run([paths.equal, model, "--lengths", "1,9,40", "--threads", "1", "--decode", "2", "--budgets", budgets,
                        "--verify"])
    checks.that(done.code == 0, f"{what}: {done.told()}")


def logits(paths, checks, what, model, *flags):
    path = paths.folder / "logits.bin"
    path.unlink(missing_ok=True)
    done = support.run([paths.sluice, "run", "-m", model, "--raw", "-p", "Once upon a time there was a sluice", "-n", "6",
                        "--ignore-eos", "--temp", "0", "-t", "1", "-c", "256", "-q", "--logits", path, *flags])
    return path.read_bytes() if checks.that(done.code == 0, f"{what}: {done.told()}") else None


def check_table_orders(paths, checks):
    model = make(paths, "sides", "--arch", "gpt-oss", "--biases", "--scales", "--experts", "8", "--experts-used", "2",
                 "--ff", "128", "--type", "mxfp4")
    wanted = logits(paths, checks, "made", model)
    inspected = json.loads(support.run_ok([paths.sluice, "inspect", model, "--json"]).out)

    def is_side(tensor):
        return "_exps" in tensor.name and tensor.name.endswith(SIDE)

    def shuffled(tensors):
        random.Random(5).shuffle(tensors)
        return tensors

    orders = {"sides first": lambda tensors: sorted(tensors, key=lambda tensor: not is_side(tensor)),
              "sides last": lambda tensors: sorted(tensors, key=is_side),
              "reversed": lambda tensors: tensors[::-1],
              "shuffled": shuffled}
    for name, order in orders.items():
        gguf = gguf_edit.Gguf(model)
        checks.equal(f"{name}: side tensors", sum(map(is_side, gguf.tensors)), 12)
        gguf.tensors = order(gguf.tensors)
        path = paths.folder / "ordered.gguf"
        gguf.write(path)
        check_equal_to_stock(paths, checks, name, path)
        checks.that(logits(paths, checks, name, path) == wanted, f"{name}: other logits")
        given = json.loads(support.run_ok([paths.sluice, "inspect", path, "--json"]).out)
        checks.equal(f"{name}: expert bytes", given["expert_bytes"], inspected["expert_bytes"])
        for layer in given["expert_layers"]:
            checks.equal(f"{name}: side tensors of a layer", len(layer["side_tensors"]), 6)


def check_doubled_scales(paths, checks):
    # llama.cpp multiplies by an expert's scale in models of this architecture, not in gpt-oss.
    model = make(paths, "scales", "--arch", "llama", "--scales", "--experts", "8", "--experts-used", "2", "--ff", "128",
                 "--type", "q8_0")
    gguf = gguf_edit.Gguf(model)
    scales = gguf.ending("_exps.scale")
    checks.equal("scales", len(scales), 6)
    for tensor in scales:
        n_expert, = tensor.shape
        values = struct.unpack_from(f"<{n_expert}f", tensor.data)
        tensor.data = struct.pack(f"<{n_expert}f", *(2 * value for value in values))
    doubled = paths.folder / "doubled.gguf"
    gguf.tensors.reverse()
    gguf.write(doubled)
    check_equal_to_stock(paths, checks, "doubled scales", doubled)
    checks.that(logits(paths, checks, "doubled scales", doubled) != logits(paths, checks, "scales", model),
                "doubled scales change nothing")


def check_fused(paths, checks):
    model = make(paths, "separate", "--arch", "deepseek2", "--experts", "8", "--experts-used", "2", "--shared-experts",
                 "1", "--ff", "128", "--type", "q8_0")
    gguf = gguf_edit.Gguf(model)
    for gate in gguf.ending("ffn_gate_exps.weight"):
        up = gguf.find(gate.name.replace("gate", "up"))
        n_expert = gate.shape[2]
        slab = len(gate.data) // n_expert
        gate.data = b"".join(gate.data[i * slab:(i + 1) * slab] + up.data[i * slab:(i + 1) * slab]
                             for i in range(n_expert))
        gate.shape[1] *= 2
        gate.name = gate.name.replace("gate", "gate_up")
        gguf.tensors.remove(up)
    fused = paths.folder / "fused.gguf"
    gguf.write(fused)
    check_equal_to_stock(paths, checks, "separate", model)
    check_equal_to_stock(paths, checks, "fused", fused)
    checks.that(logits(paths, checks, "fused", fused) == logits(paths, checks, "separate", model),
                "gate and up fused: other logits than separate")
    told = [json.loads(support.run_ok([paths.sluice, "inspect", path, "--json"]).out) for path in (model, fused)]
    checks.equal("fused: expert bytes", told[1]["expert_bytes"], told[0]["expert_bytes"])
    checks.equal("fused: experts", [layer["experts"] for layer in told[1]["expert_layers"]],
                 [layer["experts"] for layer in told[0]["expert_layers"]])
    checks.equal("fused: matrices", [len(layer["matrices"]) for layer in told[1]["expert_layers"]],
                 [2] * len(told[1]["expert_layers"]))
    checks.that(all("shexp" not in json.dumps(one["expert_layers"]) for one in told), "a shared expert is called routed")


def check_counts(paths, checks):
    small = ["--width", "64", "--ff", "32", "--heads", "2", "--head-dim", "32", "--type", "q4_0"]
    for n_expert, n_used in ((2, 1), (2, 2), (16, 16), (512, 1), (513, 10), (1024, 8)):
        what = f"{n_expert} experts, {n_used} used"
        model = make(paths, "counts", *small, "--experts", n_expert, "--experts-used", n_used)
        check_equal_to_stock(paths, checks, what, model, "min,100%")
        # No settings at all: whatever the default is, it works.
        logits(paths, checks, f"{what}, default budget", model)
    one = gguf_edit.Gguf(make(paths, "two", *small, "--experts", "2", "--experts-used", "1"))
    for tensor in one.tensors:
        if tensor.name.endswith(("_exps.weight", "ffn_gate_inp.weight")):
            tensor.data = tensor.data[:len(tensor.data) // 2]
            tensor.shape[-1] = 1
    one.set_u32("qwen3moe.expert_count", 1)
    model = paths.folder / "one.gguf"
    one.write(model)
    stock = support.run([paths.llama_bin / "llama-bench", "-m", model, "-p", "8", "-n", "2", "-r", "1", "-t", "1"])
    done = support.run([paths.sluice, "run", "-m", model, "--raw", "-p", "Hi", "-n", "2", "-t", "1", "-q"])
    checks.that(done.signal == 0 and (done.code == 0) == (stock.code == 0),
                f"one expert: {done.told()}; stock: {stock.told()}")


def check_groups_and_nextn(paths, checks):
    model = make(paths, "groups", "--arch", "deepseek2", "--dense-layers", "1", "--shared-experts", "1",
                 "--experts", "8", "--experts-used", "2", "--groups", "4", "--groups-used", "2", "--ff", "64", "--type",
                 "q8_0")
    check_equal_to_stock(paths, checks, "groups", model)
    told = json.loads(support.run_ok([paths.sluice, "inspect", model, "--json"]).out)
    checks.equal("first layer dense: layers with experts", [layer["layer"] for layer in told["expert_layers"]], [1])
    checks.that(any(tensor.name.endswith("exp_probs_b.bias") for tensor in gguf_edit.Gguf(model).tensors),
                "no selection bias, which shows nothing")

    bad = paths.folder / "bad-groups.gguf"
    for key, value in (("group_count", 3), ("group_used_count", 5), ("group_count", 0x7fffffff)):
        gguf = gguf_edit.Gguf(model)
        gguf.set_u32(f"deepseek2.expert_{key}", value)
        gguf.write(bad)
        done = support.run([paths.sluice, "inspect", bad])
        checks.that(done.code == 1 and len(done.err.splitlines()) == 1 and "group" in done.err,
                    f"expert_{key} {value}: {done.told()}")

    # A layer that only predicts further tokens is announced, without its tensors: as stock takes it.
    gguf = gguf_edit.Gguf(model)
    gguf.set_u32("deepseek2.nextn_predict_layers", 1)
    announced = paths.folder / "nextn.gguf"
    gguf.write(announced)
    done = support.run([paths.sluice, "inspect", announced])
    checks.that(done.code == 0, f"nextn announced, inspect: {done.told()}")
    stock = support.run([paths.llama_bin / "llama-bench", "-m", announced, "-p", "8", "-n", "2", "-r", "1", "-t", "1"])
    done = support.run([paths.sluice, "run", "-m", announced, "--raw", "-p", "Hi", "-n", "2", "-t", "1", "-q"])
    checks.that(done.signal == 0 and (done.code == 0) == (stock.code == 0),
                f"nextn announced: {done.told()}; stock: {stock.told()}")


def check_override(paths, checks):
    model = make(paths, "override", "--experts", "16", "--experts-used", "2", "--ff", "96", "--type", "q8_0")
    text = paths.folder / "text.txt"
    text.write_text("The keeper of the sluice opens the gate a little. " * 40)
    smallest = json.loads(support.run_ok([paths.sluice, "inspect", model, "--json"]).out)["budget_bytes_min"]
    for n_used in (1, 5, 16):
        files = []
        for name in ("stock", "plugin"):
            environment = support.clean_environment()
            if name == "plugin":
                environment = support.plugin_environment(paths.plugin, SLUICE_BUDGET=smallest)
            files.append(paths.folder / f"{name}.logits")
            files[-1].unlink(missing_ok=True)
            done = support.run([paths.llama_bin / "llama-perplexity", "-m", model, "-t", "1", "--no-repack", "-fit", "off",
                                "-f", text, "-c", "64", "--chunks", "2", "--save-all-logits", files[-1], "--override-kv",
                                f"qwen3moe.expert_used_count=int:{n_used}"], environment)
            checks.that(done.code == 0, f"override to {n_used}, {name}: {done.told()}")
        if all(file.exists() for file in files):
            stock, plugin = (file.read_bytes() for file in files)
            checks.that(len(stock) > 10_000 and stock == plugin, f"override to {n_used}: other logits than stock's")


def check_bad_routers(paths, checks):
    model = make(paths, "router", "--experts", "8", "--experts-used", "2", "--ff", "64", "--type", "q8_0")
    for name, value in (("NaN", math.nan), ("infinity", math.inf)):
        for rows in ("one row", "all rows"):
            gguf = gguf_edit.Gguf(model)
            for router in gguf.ending("ffn_gate_inp.weight"):
                checks.equal("type of the router", router.kind, gguf_edit.F32)
                width = router.shape[0]
                bad = struct.pack("<f", value) * width
                router.data = bad * router.shape[1] if rows == "all rows" else bad + router.data[len(bad):]
            path = paths.folder / "bad-router.gguf"
            gguf.write(path)
            what = f"router, {name} in {rows}"
            done = support.run([paths.sluice, "run", "-m", path, "--raw", "-p", "Hi there, keeper", "-n", "4", "--temp", "0",
                                "-t", "1", "-q", "--budget", "30%", "--verify-slots"], timeout=60)
            checks.that(done.signal == 0 and done.code in (0, 1), f"{what}: {done.told()}")
            if done.code == 1:
                checks.that("layer" in done.err and "expert" in done.err, f"{what}: {done.told()}")
            bench = [paths.llama_bin / "llama-bench", "-m", path, "-p", "16", "-n", "2", "-r", "1", "-t", "1", "--repack",
                     "0"]
            stock = support.run(bench, timeout=60)
            done = support.run(bench, support.plugin_environment(paths.plugin, SLUICE_BUDGET="30%"), timeout=60)
            checks.that(done.signal == 0 and (done.code == 0 or stock.code != 0 or "layer" in done.err),
                        f"{what}, plugin: {done.told()}; stock: {stock.told()}")


def test(paths, checks):
    check_table_orders(paths, checks)
    check_doubled_scales(paths, checks)
    check_fused(paths, checks)
    check_counts(paths, checks)
    check_groups_and_nextn(paths, checks)
    check_override(paths, checks)
    check_bad_routers(paths, checks)


if __name__ == "__main__":
    support.main(test, "sluice", "plugin", "make-model", "equal", "llama-bin", "model")
