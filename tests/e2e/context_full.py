#!/usr/bin/env python3
"""Guards against rare combinations of switches that spoil the answer or end the server.

llama-server with and without the plugin: keys and values in 16 bits, q8_0 and q4_0, context shift on and off, 1 and 4
slots, micro-batches of 1, 32 and 512, the model mapped, read and read directly. In each cell a prompt longer than the
context, an answer of 600 tokens in a context of 256, and a short question after it: the same status and the same text as
stock's, and the server still answers.
"""

import json
import urllib.error
import urllib.request

import server_plugin
import support

CONTEXT = 256
LONG = "The keeper of the sluice opens the gate a little. " * 60
REQUESTS = [(LONG, 4), ("Once upon a time", 600), ("What is a sluice?", 12)]
# keys and values, context shift, slots, micro-batch, load mode
CELLS = [("f16", True, 1, 512, "mmap"), ("f16", False, 4, 32, "none"), ("q8_0", False, 1, 512, "dio"),
         ("q8_0", True, 4, 1, "mmap"), ("q4_0", True, 1, 32, "none"), ("q4_0", False, 4, 512, "mmap")]


def complete(server, prompt, n_tokens):
    """(HTTP status, text) of one answer."""
    body = {"prompt": prompt, "n_predict": n_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/completion", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, json.load(reply)["content"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["type"]
    except OSError as error:
        return 0, f"{error}; the server's last line: {server.last_line()}"


def test(paths, checks):
    # Attention in every layer, so that a context can be shifted; and a short one at that.
    model = paths.folder / "model.gguf"
    support.run_ok([paths.make_model, "--tokenizer", paths.model, "--layers", "2", "--experts", "16", "--experts-used", "2",
                    "--ff", "64", "--type", "q8_0", "--out", model])
    paths.model = model
    for kv, shift, slots, ubatch, mode in CELLS:
        what = f"{kv}, {'shift' if shift else 'no shift'}, {slots} slots, micro-batch {ubatch}, {mode}"
        flags = ["-ctk", kv, "-ctv", kv, "-fa", "on", "-ub", str(ubatch), "-lm", mode,
                 "--context-shift" if shift else "--no-context-shift"]
        answers = {}
        stats = paths.folder / "stats.json"
        for name in ("stock", "plugin"):
            environment = support.clean_environment()
            if name == "plugin":
                environment = support.plugin_environment(paths.plugin, SLUICE_BUDGET="40%", SLUICE_STATS=stats)
            with server_plugin.Server(paths, environment, slots, CONTEXT, flags) as server:
                answers[name] = [complete(server, *request) for request in REQUESTS]
                checks.equal(f"{what}, {name}: exit code after SIGTERM", server.stop(), 0)
        checks.equal(what, answers["plugin"], answers["stock"])
        checks.that(answers["stock"][2][0] == 200, f"{what}: stock does not answer any more: {answers['stock'][2]}")
        checks.that(answers["stock"][0][0] != 200, f"{what}: the long prompt fits, which shows nothing")
        support.check_streamed(checks, what, stats, model)


if __name__ == "__main__":
    support.main(test, "plugin", "make-model", "llama-bin", "model")
