#!/usr/bin/env python3
"""Ctrl-C and SIGTERM end `sluice run` in order, wherever it is: while it loads, reads a prompt, or answers.

Exit 130 for Ctrl-C and 143 for SIGTERM, figures told and written for what was done by then, no crash. A second signal
ends it too. In a chat, Ctrl-C stops the answer and the chat goes on. How long the end takes is shown, not judged; what
would run to its end in spite of the signal is noticed by its exit code.
"""

import os
import pty
import queue
import signal
import subprocess
import threading
import time

import support

INTERRUPTED, TERMINATED = 130, 143
END_SECONDS_MAX = 60  # before a run counts as hanging
LONG_ANSWER = ["-n", "3000", "--ignore-eos", "--temp", "0"]


class Running:
    """A `sluice run` whose output can be waited for. Killed, if need be, when left."""

    def __init__(self, paths, *arguments, stdin=subprocess.DEVNULL):
        self.process = subprocess.Popen(
            [str(part) for part in [paths.sluice, "run", "-m", paths.model, "-t", "1", "--budget", "25%", *arguments]],
            env=support.clean_environment(), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.text = {"out": "", "err": ""}
        self.arrived = queue.Queue()
        self.readers = [threading.Thread(target=self.read, args=(name, stream), daemon=True)
                        for name, stream in (("out", self.process.stdout), ("err", self.process.stderr))]
        for reader in self.readers:
            reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def read(self, name, stream):
        while piece := os.read(stream.fileno(), 65536):
            self.arrived.put((name, piece.decode(errors="replace")))
        self.arrived.put((name, None))

    def take(self, seconds):
        try:
            name, piece = self.arrived.get(timeout=seconds)
        except queue.Empty:
            return False
        if piece is not None:
            self.text[name] += piece
        return True

    def wait_for(self, name, condition, what):
        """Until condition(all text that came on `name`) holds."""
        end = time.monotonic() + 120
        while not condition(self.text[name]):
            self.take(0.2)
            if time.monotonic() > end or (self.process.poll() is not None and self.arrived.empty()):
                raise support.Failed(f"{what} did not come: exit {self.process.poll()}, {support.shortened(self.text)}")

    def signal(self, number):
        self.process.send_signal(number)

    def end(self):
        """What a shell would show."""
        start = time.monotonic()
        try:
            code = self.process.wait(END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            return f"still running after {END_SECONDS_MAX} s"
        self.seconds = time.monotonic() - start
        for reader in self.readers:
            reader.join()
        while self.take(0):
            pass
        return f"killed by {signal.Signals(-code).name}" if code < 0 else code


def check_figures(checks, what, run, stats_path):
    """The report on standard error and the statistics of a run that was stopped while it answered."""
    checks.that("\nanswer " in "\n" + run.text["err"], f"{what}: no report: {support.shortened(run.text['err'])}")
    if checks.that(stats_path.is_file(), f"{what}: no statistics were written"):
        stats = support.read_json(stats_path)
        checks.that(0 < stats["generated_tokens"] < 3000, f"{what}: {stats['generated_tokens']} tokens were generated")
        checks.that(stats["experts"]["requests"] > 0, f"{what}: the statistics tell of no experts")


def check_answering(paths, checks):
    for name, number, wanted in (("SIGINT", signal.SIGINT, INTERRUPTED), ("SIGTERM", signal.SIGTERM, TERMINATED)):
        what = f"{name} while answering"
        stats = paths.folder / f"{name}.json"
        with Running(paths, "-p", "Tell me about the sea.", *LONG_ANSWER, "--stats", stats) as run:
            run.wait_for("out", lambda text: len(text) > 40, "an answer")
            run.signal(number)
            checks.equal(what, run.end(), wanted)
            check_figures(checks, what, run, stats)
            print(f"{what}: ended after {run.seconds:.2f} s")


def check_two_at_once(paths, checks):
    for _ in range(3):
        with Running(paths, "-p", "Tell me about the sea.", *LONG_ANSWER) as run:
            run.wait_for("out", lambda text: len(text) > 40, "an answer")
            run.signal(signal.SIGINT)
            run.signal(signal.SIGINT)
            checks.equal("two SIGINT at once", run.end(), INTERRUPTED)


def check_loading_and_reading(paths, checks):
    prompt = paths.folder / "prompt.txt"
    # 3000 tokens and more; one at a time, so that the signal finds it at work on a fast machine too.
    prompt.write_text("The sea is wide and the river is long. " * 350)
    reading = ["--raw", "-f", prompt, "-n", "4", "-c", "8192", "-b", "16", "--ubatch", "1", "-v"]
    with Running(paths, *reading) as run:
        run.wait_for("err", lambda text: "memory available" in text, "the first line")
        run.signal(signal.SIGINT)
        checks.equal("SIGINT while loading", run.end(), INTERRUPTED)
        checks.equal("SIGINT while loading: text", run.text["out"].strip(), "")
    for name, number, wanted in (("SIGINT", signal.SIGINT, INTERRUPTED), ("SIGTERM", signal.SIGTERM, TERMINATED)):
        what = f"{name} while reading the prompt"
        with Running(paths, *reading) as run:
            run.wait_for("err", lambda text: "seed " in text, "the line before the prompt is read")
            time.sleep(0.3)
            run.signal(number)
            checks.equal(what, run.end(), wanted)
            checks.equal(f"{what}: text", run.text["out"].strip(), "")
            print(f"{what}: ended after {run.seconds:.2f} s")


def check_chat(paths, checks):
    """Ctrl-C stops an answer, twice; the end of the input ends the chat."""
    ours, theirs = pty.openpty()
    try:
        with Running(paths, *LONG_ANSWER, stdin=theirs) as run:
            for turn, question in enumerate(("Tell me about the sea.", "What is a river?"), 1):
                run.wait_for("err", lambda text: text.count("> ") >= turn, f"prompt {turn}")
                before = len(run.text["out"])
                os.write(ours, question.encode() + b"\n")
                run.wait_for("out", lambda text: len(text) > before + 40, f"answer {turn}")
                run.signal(signal.SIGINT)
            run.wait_for("err", lambda text: text.count("> ") >= 3, "prompt 3")
            os.write(ours, b"\x04")
            checks.equal("chat with two stopped answers", run.end(), 0)
    finally:
        os.close(ours)
        os.close(theirs)


def test(paths, checks):
    check_answering(paths, checks)
    check_two_at_once(paths, checks)
    check_loading_and_reading(paths, checks)
    check_chat(paths, checks)


if __name__ == "__main__":
    support.main(test, "sluice", "model")
