"""Addresses and ports."""

from __future__ import annotations

import socket
from itertools import pairwise

import pytest

from megarl.errors import SetupError
from megarl.launch.network import BLOCK, HeadPorts, address_towards, candidate_blocks, head_ports, is_free


def test_a_block_is_below_the_ephemeral_range_and_blocks_do_not_overlap():
    blocks = sorted(candidate_blocks(123))
    assert blocks[0] >= 1024
    assert blocks[-1] + BLOCK <= 32_768
    assert all(later - earlier == BLOCK for earlier, later in pairwise(blocks))


def test_jobs_that_follow_each_other_start_at_different_blocks():
    assert len({candidate_blocks(job)[0] for job in range(1000, 1200)}) == 200


def test_every_port_of_the_head_is_inside_its_block():
    ports = [int(option.split("=")[1]) for option in HeadPorts(20_000).options()]
    assert len(set(ports)) == len(ports)
    assert all(20_000 <= port < 20_000 + BLOCK for port in ports)


def test_a_block_with_a_taken_port_is_passed_over():
    first = head_ports(77).base
    with socket.socket() as taken:
        taken.bind(("", first + 5))
        assert not is_free(first + 5)
        assert head_ports(77).base != first
    assert head_ports(77).base == first


def test_the_address_is_the_one_of_the_route():
    assert address_towards("127.0.0.1") == "127.0.0.1"


def test_a_peer_that_does_not_resolve_is_an_error():
    with pytest.raises(SetupError, match=r"no route from .* to no\.such\.host\.invalid"):
        address_towards("no.such.host.invalid")
