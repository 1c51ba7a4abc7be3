"""Tokenizers that several threads share, as in a server, and that a process is forked with."""

import os
import signal
import sys
import time
import warnings
from threading import Event, Thread

import pytest

from transformers import tokenization_utils_fast


class Interrupted:
    """A backend in whose first call another thread calls the tokenizer."""

    def __init__(self, tokenizer, call):
        self.backend, self.tokenizer, self.call = tokenizer._tokenizer, tokenizer, call
        self.other = None

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def encode_batch(self, *inputs, **settings):
        """The backend's encodings, after the other thread's call if that does not wait."""
        if self.other is None:
            self.other = Thread(target=self.call)
            self.other.start()
            self.other.join(timeout=0.2)
        return self.backend.encode_batch(*inputs, **settings)


@pytest.mark.parametrize("limit", [None, 4])
def test_another_thread_s_call_does_not_change_how_texts_are_cut(tokenizer, limit):
    settings = {} if limit is None else {"truncation": True, "max_length": limit}
    expected, found = tokenizer("a b c a b c", truncation=True, max_length=6)["input_ids"], []
    others = tokenizer("a b c a b c", **settings)["input_ids"]
    backend = Interrupted(
        tokenizer, lambda: found.append(tokenizer("a b c a b c", **settings)["input_ids"])
    )
    tokenizer._tokenizer = backend
    assert tokenizer("a b c a b c", truncation=True, max_length=6)["input_ids"] == expected
    backend.other.join()
    assert found == [others]


class Slow:
    """A backend that says when its first call has begun, and takes its time."""

    def __init__(self, backend):
        self.backend, self.has_begun = backend, Event()

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def encode_batch(self, *inputs, **settings):
        """The backend's encodings."""
        if not self.has_begun.is_set():
            self.has_begun.set()
            time.sleep(0.2)
        return self.backend.encode_batch(*inputs, **settings)


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_process_cuts_texts_as_its_own_calls_say(tokenizer):
    expected = tokenizer("a b c a b c")["input_ids"]
    tokenizer._tokenizer = slow = Slow(tokenizer._tokenizer)
    call = Thread(target=tokenizer, args=["a b c"], kwargs={"truncation": True, "max_length": 4})
    call.start()
    slow.has_begun.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if tokenizer("a b c a b c")["input_ids"] == expected else 1)
    call.join()
    assert os.waitpid(child, 0)[1] == 0


def test_a_call_within_a_call_of_the_same_thread_does_not_wait(tokenizer):
    """As in a signal handler."""
    lock = tokenization_utils_fast._one_thread
    with lock:
        assert lock.acquire(blocking=False)
        lock.release()
        assert tokenizer("a")["input_ids"]
