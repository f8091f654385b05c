"""Ray on one node: what it takes for the end of the head."""

from __future__ import annotations

import socket

import pytest

from megarl.launch import node


def test_a_head_has_gone_when_its_machine_says_twice_that_nobody_listens_any_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node, "LOOK_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        head = node.Head(f"127.0.0.1:{server.getsockname()[1]}")
        assert head.listens() and not head.has_gone()
    assert head.listens() is False
    assert [head.has_gone() for _ in range(3)] == [False, True, True]


def test_a_head_that_is_not_up_yet_or_says_nothing_has_not_gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node, "LOOK_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    head = node.Head(f"127.0.0.1:{port}")
    assert head.listens() is False and not any(head.has_gone() for _ in range(4))
    assert node.Head("no.such.host.invalid:1").listens() is None
