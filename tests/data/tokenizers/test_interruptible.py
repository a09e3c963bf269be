"""Native work leaves the main thread free for signals."""

import os
import signal
import threading

import pytest

from flatout.data.tokenizers.bpe import interruptibly


def test_the_work_reads_every_text():
    read = []
    interruptibly(read.extend, iter(["a", "b"]))
    assert read == ["a", "b"]


def test_an_error_of_the_work_is_raised():
    def fail(texts):
        raise ValueError(next(texts))

    with pytest.raises(ValueError, match="bad"):
        interruptibly(fail, ["bad"])


def test_a_signal_interrupts_the_caller_and_ends_the_texts():
    started, ended = threading.Event(), threading.Event()

    def endless():
        while True:
            yield "text"

    def work(texts):
        try:
            for _ in texts:
                if not started.is_set():
                    started.set()
                    os.kill(os.getpid(), signal.SIGINT)
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        interruptibly(work, endless())
    assert ended.wait(60)
