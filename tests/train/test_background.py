"""The background thread runs its tasks in order, and ends with its owner."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from holdfast.train.checkpoint.background import BackgroundWorker


def test_what_is_handed_over_is_done_in_order_and_told():
    done, behind = list[int](), BackgroundWorker("test")
    doings = [behind.submit(lambda number=number: done.append(number) or number) for number in range(100)]
    assert [each.result() for each in doings] == done == list(range(100))
    assert all(each.done() for each in doings)


def test_what_is_not_over_is_not_done():
    go_on, behind = threading.Event(), BackgroundWorker("test")
    doing = behind.submit(lambda: go_on.wait(60))
    assert not doing.done()
    go_on.set()
    assert doing.result() is True


def test_what_it_raised_is_raised_and_the_next_is_done():
    behind = BackgroundWorker("test")
    failed = behind.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert behind.submit(lambda: 2).result() == 2


def test_nothing_of_what_was_done_is_held():
    class Held:
        pass

    held, behind = Held(), BackgroundWorker("test")
    gone = weakref.ref(held)
    behind.submit(lambda held=held: None).result()
    del held
    behind.drain()
    gc.collect()
    assert gone() is None


def test_thread_ends_with_who_had_it():
    behind = BackgroundWorker("test that ends")
    behind.submit(int).result()
    (thread,) = (each for each in threading.enumerate() if each.name == "test that ends")
    del behind
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_process_that_ends_waits_for_what_was_handed_over():
    code = (
        "import threading; from holdfast.train.checkpoint.background import BackgroundWorker\n"
        "worker = BackgroundWorker('b');"
        "worker.submit(lambda: (threading.main_thread().join(), print('done')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "done\n"
