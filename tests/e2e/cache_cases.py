#!/usr/bin/env python3
"""What users report of expert caches, as small runs: defaults that do not meet the engine's own minimum, prompts that
touch more experts than fit, experts that are too small to be streamed, options without effect.

Every run that claims to stream must evict, or it proves nothing.
"""

import json

import support

PROMPT = "The sea is a large body of water, and rivers are"
TOKENS = 12


def make(paths, name, *options):
    model = paths.folder / f"{name}.gguf"
    support.run_ok([paths.make_model, "--tokenizer", paths.tokenizer, "--seed", 9, "--out", model, *options])
    return model


def run(paths, name, model, *flags, prompt=("-p", PROMPT), tokens=TOKENS):
    """(how it ended, what it said in tokens, its figures)"""
    files = [paths.folder / f"{name}.{kind}" for kind in ("tokens", "stats")]
    for file in files:
        file.unlink(missing_ok=True)
    done = support.run([paths.sluice, "run", "-m", model, "--raw", *prompt, "-n", tokens, "--ignore-eos", "--temp", 0,
                        "-t", 1, "--tokens", files[0], "--stats", files[1], *flags])
    if done.code != 0:
        return done, None, None
    return done, support.read_json(files[0])["generated"], support.read_json(files[1])


def smallest_budget(paths, model):
    return json.loads(support.run_ok([paths.sluice, "inspect", model, "--json"]).out)["budget_bytes_min"]


def check_defaults_meet_the_minimum(paths, checks):
    for used, experts in ((2, 256), (6, 256), (8, 256), (10, 256)):
        model = make(paths, f"default-{used}", "--layers", 2, "--width", 64, "--heads", 2, "--ff", 64, "--experts",
                     experts, "--experts-used", used)
        what = f"{used} of {experts} experts"
        done, wanted, stats = run(paths, "default", model)
        if not checks.that(done.code == 0, f"{what}, no options: {done.told()}"):
            continue
        checks.that(stats["budget_bytes"] >= stats["budget_bytes_min"], f"{what}: the default is below the minimum")
        done, tokens, stats = run(paths, "min", model, "--budget", smallest_budget(paths, model))
        if checks.that(done.code == 0, f"{what}, smallest budget: {done.told()}"):
            checks.equal(f"{what}, smallest budget: tokens", tokens, wanted)
            checks.that(stats["experts"]["evictions"] > 0, f"{what}, smallest budget: nothing was evicted")
        done, tokens, _ = run(paths, "huge", model, "--budget", "1000GiB")
        if checks.that(done.code == 0, f"{what}, a budget far above the machine's memory: {done.told()}"):
            checks.equal(f"{what}, a budget far above: tokens", tokens, wanted)
        model.unlink()


def check_long_prompt_reads_each_expert_once(paths, checks):
    layers, experts, ubatch = 3, 64, 512
    model = make(paths, "long", "--layers", layers, "--width", 64, "--heads", 2, "--ff", 64, "--experts", experts,
                 "--experts-used", 4)
    text = paths.folder / "long.txt"
    text.write_text((PROMPT + ". ") * 250)
    flags = ["-c", 4096, "--ubatch", ubatch]
    done, wanted, _ = run(paths, "all", model, "--budget", "100%", *flags, prompt=("-f", text), tokens=1)
    if not checks.that(done.code == 0, f"long prompt, all experts: {done.told()}"):
        return
    done, tokens, stats = run(paths, "long", model, "--budget", smallest_budget(paths, model), *flags,
                              prompt=("-f", text), tokens=1)
    if not checks.that(done.code == 0, f"long prompt, smallest budget: {done.told()}"):
        return
    checks.equal("long prompt: tokens", tokens, wanted)
    n_prompt = stats["prefill"]["tokens"]
    checks.that(n_prompt >= 2000, f"the long prompt has only {n_prompt} tokens")
    batches = -(-n_prompt // ubatch)
    for layer in stats["layers"]:
        if layer["requests"] == 0:
            continue
        checks.that(layer["loads"] <= batches * experts,
                    f"layer {layer['layer']}: {layer['loads']} reads of {experts} experts in {batches} micro-batches")
        # The last layer is computed for the last token alone.
        if layer["layer"] < layers - 1:
            checks.that(layer["unplaced"] > 0, f"layer {layer['layer']}: everything fitted, which proves nothing")
    print(f"long prompt: {n_prompt} tokens in {batches} micro-batches, {stats['experts']['loads']} loads")


def check_experts_of_every_size_stream(paths, checks):
    # Bytes of one expert: 3 matrices, 18 bytes for 32 weights.
    for name, width, ff in (("4 KiB", 64, 32), ("64 KiB", 256, 160), ("300 KiB", 512, 352)):
        model = make(paths, "sized", "--layers", 2, "--width", width, "--heads", 2, "--ff", ff, "--experts", 32,
                     "--experts-used", 4)
        done, wanted, _ = run(paths, "all", model, "--budget", "100%")
        checks.that(done.code == 0, f"experts of {name}: {done.told()}")
        done, tokens, stats = run(paths, "some", model, "--budget", smallest_budget(paths, model))
        if checks.that(done.code == 0, f"experts of {name}, smallest budget: {done.told()}"):
            checks.equal(f"experts of {name}: tokens", tokens, wanted)
            checks.that(stats["streaming"] and stats["experts"]["evictions"] > 0, f"experts of {name} do not stream")
        model.unlink()


def check_placement_options(paths, checks):
    """Options of stock tools that may take the experts away from us: the figures must say what is in effect."""
    model = make(paths, "placed", "--layers", 2, "--width", 64, "--heads", 2, "--ff", 64, "--experts", 32,
                 "--experts-used", 4)
    base = [paths.llama_bin / "llama-completion", "-m", model, "-no-cnv", "-p", PROMPT, "-n", 8, "--ignore-eos",
            "--temp", 0, "-t", 1, "-c", 256, "--no-repack", "-fit", "off"]
    stock = support.run([*base], support.clean_environment())
    for name, flags in (("-ngl 0", ["-ngl", 0]), ("--device none", ["--device", "none"]), ("no mmap", ["-lm", "none"]),
                        ("-ot exps=CPU", ["-ot", "exps=CPU"])):
        stats_path = paths.folder / "placed.stats"
        stats_path.unlink(missing_ok=True)
        done = support.run([*base, *flags], support.plugin_environment(
            paths.plugin, SLUICE_STATS=stats_path, SLUICE_BUDGET=smallest_budget(paths, model)))
        if not checks.that(done.code == 0, f"{name}: {done.told()}"):
            continue
        checks.equal(f"{name}: text", done.out, stock.out)
        stats = support.read_json(stats_path) if stats_path.exists() else None
        print(f"{name}: streaming {stats and stats['streaming']}")
        # Whether they stream is the tool's choice; what is told must be so.
        evictions = stats["experts"]["evictions"] if stats else 0
        checks.that(not stats or stats["streaming"] == (evictions > 0), f"{name}: {evictions} evictions, and {stats}")
        if name in ("-ngl 0", "no mmap"):
            checks.that(evictions > 0, f"{name}: nothing streamed")


def test(paths, checks):
    check_defaults_meet_the_minimum(paths, checks)
    check_long_prompt_reads_each_expert_once(paths, checks)
    check_experts_of_every_size_stream(paths, checks)
    check_placement_options(paths, checks)


if __name__ == "__main__":
    support.main(test, "sluice", "plugin", "make-model", "llama-bin", "tokenizer")
