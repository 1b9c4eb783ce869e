"""Nobody waits for a replica that is gone before it has connected."""

from __future__ import annotations

import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from holdfast.train.peerlinks import WAIT, Gloo

DEADLINE_S = 30.0


@pytest.mark.parametrize("who", ["member", "store"])
def test_group_whose_member_or_store_never_comes_is_given_up(who: str) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = f"localhost:{store.port if who == 'member' else 1}/quorum"
    group = Gloo(timeout=WAIT)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(group.configure, place, "0", 0, 2, 1, 0, 1, [0, 1])
        deadline = time.monotonic() + DEADLINE_S
        while not joining.done() and time.monotonic() < deadline:
            group.connecting.give_up(ConnectionError("lost: replica 1"))
        with pytest.raises(ConnectionError, match="lost: replica 1"):
            joining.result(0)
    assert group.members == {0, 1}


def test_group_of_one_connects() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = Gloo(timeout=WAIT)
    group.configure(f"localhost:{store.port}/quorum", "0", 0, 1, 1, 0, 1, [0])
    assert group.size() == 1


def test_group_that_is_left_is_held_by_nobody_so_that_its_connections_close() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = Gloo(timeout=WAIT)
    group.configure(f"localhost:{store.port}/quorum", "0", 0, 1, 1, 0, 1, [0])
    held = weakref.ref(group.parent)
    group.leave()
    deadline = time.monotonic() + DEADLINE_S
    while held() is not None:
        assert time.monotonic() < deadline
