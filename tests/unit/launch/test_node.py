"""Ray on one node: what it takes for the end of the head."""

from __future__ import annotations

import socket

from megarl.launch import node


def test_a_head_has_gone_when_its_machine_says_that_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not node.refuses(address)
    assert node.refuses(address)
    assert not node.refuses("no.such.host.invalid:1")
