#!/usr/bin/env python3
"""Unmodified llama-server with the plugin answers as it does without it.

Compared on the same machine: answers to three questions, streamed and not, one at a time (then with the log-probability
of every token) and four at once in four slots. The plugin runs with a quarter of the experts in memory.
"""

import json
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

import support

QUESTIONS = ["What is the capital of Germany?", "What is a sluice?", "Write a sentence about the sea."]
FOUR_AT_ONCE = QUESTIONS + ["What is the chemical symbol of iron?"]
ANSWER_TOKENS_MAX = 40
# ggml rearranges weights by default, which changes the rounding; ours computes on the bytes of the file.
SERVER_FLAGS = ["--no-repack", "-t", "1", "--no-warmup", "-fit", "off", "--offline"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A llama-server on a loopback port, ready when constructed. stop() ends it; leaving `with` does so by force.

    `context`: tokens of one slot."""

    def __init__(self, paths, environment, slots, context=512, flags=()):
        # Someone else may take the port between its choice and its use.
        for _ in range(3):
            self.port = free_port()
            self.log = open(paths.folder / f"server-{self.port}.log", "w+b")
            self.process = subprocess.Popen(
                [paths.llama_bin / "llama-server", "-m", paths.model, "--host", "127.0.0.1", "--port", str(self.port),
                 "-np", str(slots), "-c", str(context * slots), *SERVER_FLAGS, *flags],
                env=environment, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
            if self.is_ready():
                return
        raise support.Failed(f"llama-server does not start: {self.last_line()}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def is_ready(self):
        end = time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10) as reply:
                    if reply.status == 200:
                        return True
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        self.process.kill()
        self.process.wait()
        return False

    def last_line(self):
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def post(self, body):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/chat/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=300)
        except urllib.error.HTTPError as error:
            raise support.Failed(f"the server refuses: {error.read().decode(errors='replace')}") from None
        except OSError as error:
            raise support.Failed(f"no answer: {error}; the server's last line: {self.last_line()}") from None

    def answer(self, question, **options):
        """(text, why it ended, log-probabilities) of one answer."""
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": ANSWER_TOKENS_MAX,
                "cache_prompt": False, **options}
        with self.post(body) as reply:
            choice = json.load(reply)["choices"][0]
        logprobs = choice.get("logprobs") or {}
        return (choice["message"]["content"], choice["finish_reason"],
                [(token["token"], token["logprob"]) for token in logprobs.get("content", [])])

    def streamed_answer(self, question):
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": ANSWER_TOKENS_MAX,
                "cache_prompt": False, "stream": True}
        text, end, pieces, done = "", None, 0, False
        with self.post(body) as reply:
            for line in reply:
                line = line.decode().strip()
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    done = True
                    break
                for choice in json.loads(line[len("data: "):])["choices"]:
                    piece = choice["delta"].get("content") or ""
                    pieces += 1 if piece else 0
                    text += piece
                    end = choice["finish_reason"] or end
        if not done or pieces < 2:
            raise support.Failed(f"'{question}': no stream of pieces, but {pieces} and {'an' if done else 'no'} end")
        return text, end

    def answers_at_once(self, questions):
        answers = [None] * len(questions)

        def ask(index):
            try:
                answers[index] = self.answer(questions[index])[:2]
            except support.Failed as reason:
                answers[index] = str(reason)

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(questions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def stop(self):
        """The exit code after SIGTERM."""
        self.process.terminate()
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            return "still running a minute after SIGTERM"


def one_by_one(server):
    return {"whole": [server.answer(question, logprobs=True) for question in QUESTIONS],
            "streamed": [server.streamed_answer(question) for question in QUESTIONS]}


def at_once(server):
    return [server.answers_at_once(FOUR_AT_ONCE) for _ in range(2)]


def test(paths, checks):
    answers = {}
    for name in ("stock", "plugin"):
        for slots, ask in ((1, one_by_one), (4, at_once)):
            stats = paths.folder / f"{name}-{slots}.json"
            environment = support.clean_environment()
            if name == "plugin":
                environment = support.plugin_environment(paths.plugin, SLUICE_BUDGET="25%", SLUICE_STATS=stats)
            with Server(paths, environment, slots) as server:
                answers[name, slots] = ask(server)
                checks.equal(f"{name}, {slots} slots: exit code after SIGTERM", server.stop(), 0)
            if name == "plugin":
                support.check_streamed(checks, f"{slots} slots", stats, paths.model)

    stock, plugin = answers["stock", 1], answers["plugin", 1]
    checks.equal("different questions, different answers", len({text for text, _, _ in stock["whole"]}), len(QUESTIONS))
    for index, question in enumerate(QUESTIONS):
        text, end, logprobs = stock["whole"][index]
        checks.that(len(logprobs) > 3, f"'{question}': stock gives no log-probabilities")
        checks.equal(f"'{question}'", plugin["whole"][index][:2], (text, end))
        checks.equal(f"'{question}': log-probabilities", plugin["whole"][index][2], logprobs)
        checks.equal(f"'{question}', streamed", plugin["streamed"][index], (text, end))
        checks.equal(f"'{question}', streamed by stock", stock["streamed"][index], (text, end))
        print(f"{question}  {text}")
    for attempt, plugin_answers in enumerate(answers["plugin", 4]):
        for question, given, wanted in zip(FOUR_AT_ONCE, plugin_answers, answers["stock", 4][attempt]):
            checks.equal(f"'{question}', four at once", given, wanted)


if __name__ == "__main__":
    support.main(test, "plugin", "llama-bin", "model")
