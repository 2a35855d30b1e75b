#!/usr/bin/env python3
"""Unmodified llama.cpp tools with the plugin compute what they compute without it, however they load the model.

llama-perplexity   the logits file (--save-all-logits) is the same, byte for byte
llama-imatrix      the importance matrix it writes, sums and counts of every expert, is the same, byte for byte
llama-bench        loads, runs both tests and names the backend
llama-completion   answers and ends well (its text is not compared: its logger may lose the end of it)

Each with the model mapped, read (load mode none) and read past the page cache (dio), a quarter of the experts in
memory. Stock runs once: how it loads the model makes no difference to its results.
"""

import json
import re

import support

LOAD_MODES = ["mmap", "none", "dio"]
BUDGET = "25%"


def common_flags(paths):
    # ggml rearranges weights by default, which changes the rounding; ours computes on the bytes of the file.
    return ["-m", paths.model, "-t", "1", "--no-repack", "-fit", "off"]


def text_flags(paths):
    return common_flags(paths) + ["-f", paths.text, "-c", "128", "--chunks", "3"]


def perplexity(paths, name, environment, *flags):
    """(the figure it prints, the bytes of its logits file)."""
    logits = paths.folder / f"{name}.logits"
    done = support.run_ok(
        [paths.llama_bin / "llama-perplexity", *text_flags(paths), "--save-all-logits", logits, *flags], environment)
    figure = re.search(r"Final estimate: PPL = ([0-9.]+ \+/- [0-9.]+)", done.out + done.err)
    return figure.group(1) if figure else None, logits.read_bytes()


def importance(paths, name, environment, *flags):
    matrix = paths.folder / f"{name}.imatrix.gguf"
    support.run_ok([paths.llama_bin / "llama-imatrix", *text_flags(paths), "-o", matrix, *flags], environment)
    return matrix.read_bytes()


def check_bench(paths, checks, what, environment, mode):
    done = support.run([paths.llama_bin / "llama-bench", "-m", paths.model, "-p", "64", "-n", "8", "-r", "1", "-t", "1",
                        "--repack", "0", "-o", "json", "-lm", mode], environment)
    if not checks.that(done.code == 0, f"{what}: {done.told()}"):
        return
    tests = json.loads(done.out)
    checks.equal(f"{what}: tests", [(test["n_prompt"], test["n_gen"]) for test in tests], [(64, 0), (0, 8)])
    for test in tests:
        checks.that("SLUICE" in test["backends"], f"{what}: backends {test['backends']}")
        checks.that(test["avg_ts"] > 0, f"{what}: {test['avg_ts']} tokens a second")


def test(paths, checks):
    stock_figure, stock_logits = perplexity(paths, "stock", support.clean_environment())
    stock_importance = importance(paths, "stock", support.clean_environment())
    checks.that(len(stock_logits) > 100_000, f"stock's logits file has {len(stock_logits)} bytes")
    checks.that(b"ffn_down_exps.weight.counts" in stock_importance, "stock's importance matrix counts no experts")
    print(f"perplexity of stock: {stock_figure}")

    for mode in LOAD_MODES:
        def with_plugin(tool):
            stats = paths.folder / f"{tool}-{mode}.json"
            return stats, support.plugin_environment(paths.plugin, SLUICE_BUDGET=BUDGET, SLUICE_STATS=stats)

        stats, environment = with_plugin("perplexity")
        figure, logits = perplexity(paths, mode, environment, "-lm", mode)
        # The tool's logger may lose its last lines; the file is the comparison.
        checks.that(figure in (None, stock_figure), f"perplexity, {mode}: {figure}, stock {stock_figure}")
        checks.that(logits == stock_logits, f"perplexity, {mode}: other logits than stock's")
        support.check_streamed(checks, f"perplexity, {mode}", stats, paths.model)

        stats, environment = with_plugin("imatrix")
        checks.that(importance(paths, mode, environment, "-lm", mode) == stock_importance,
                    f"imatrix, {mode}: another matrix than stock's")
        support.check_streamed(checks, f"imatrix, {mode}", stats, paths.model)

        stats, environment = with_plugin("bench")
        check_bench(paths, checks, f"bench, {mode}", environment, mode)
        support.check_streamed(checks, f"bench, {mode}", stats, paths.model)

        stats, environment = with_plugin("completion")
        done = support.run([paths.llama_bin / "llama-completion", *common_flags(paths), "-c", "256", "-lm", mode,
                            "-no-cnv", "-p", "What is a sluice?", "-n", "16", "--temp", "0"], environment)
        checks.that(done.code == 0, f"completion, {mode}: {done.told()}")
        support.check_streamed(checks, f"completion, {mode}", stats, paths.model)


if __name__ == "__main__":
    support.main(test, "plugin", "llama-bin", "model", "text")
