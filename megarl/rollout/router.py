"""Which replica continues which prompt: pure, so that the same requests always go the same way.

Invariants:
1. Every request goes to one replica; all requests of a group go to the same one, where they share the prompt's cache.
2. Groups are placed longest expected first, each on the replica with the least expected tokens so far; ties go to the
   lower index, so the result does not depend on anything but the arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from megarl.errors import RolloutError
from megarl.rollout.engine import Completion, Request


def route(
    requests: Sequence[Request],
    num_replicas: int,
    *,
    n: int,
    max_tokens: int,
    expected_tokens: Mapping[int, float] | None = None,
) -> list[list[Request]]:
    """The requests of each replica, in the order given.

    Args:
        requests: what to spread.
        num_replicas: how many engines there are.
        n: samples per request.
        max_tokens: longest response; what a response is expected to take where nothing better is known.
        expected_tokens: expected response length by request id, such as the mean seen for the prompt before.

    Raises:
        RolloutError: two requests have one id, or there is no replica.
    """
    if num_replicas < 1:
        raise RolloutError("there is no rollout replica")
    if len({request.request_id for request in requests}) != len(requests):
        raise RolloutError("two requests have the same id")
    known = expected_tokens if expected_tokens is not None else {}
    costs: dict[tuple[str, int], float] = {}
    for request in requests:
        response = known.get(request.request_id, max_tokens)
        # The prompt is computed once for all samples; each generated token is one step of its own.
        cost = len(request.prompt_token_ids) + num_samples(request, n) * response
        key = _group(request)
        costs[key] = costs.get(key, 0.0) + cost
    loads = [(0.0, replica) for replica in range(num_replicas)]
    placed: dict[tuple[str, int], int] = {}
    # sorted() is stable: equal costs keep the order of the requests.
    for key, cost in sorted(costs.items(), key=lambda item: -item[1]):
        load, replica = heapq.heappop(loads)
        placed[key] = replica
        heapq.heappush(loads, (load + cost, replica))
    parts: list[list[Request]] = [[] for _ in range(num_replicas)]
    for request in requests:
        parts[placed[_group(request)]].append(request)
    return parts


def collect(
    parts: Sequence[Sequence[Request]], results: Sequence[Sequence[tuple[int, list[Completion]]]], *, n: int
) -> dict[int, list[Completion]]:
    """Samples by request id from what each replica returned for its part.

    Raises:
        RolloutError: naming the replica that answered something else than it was asked.
    """
    samples: dict[int, list[Completion]] = {}
    for replica, (part, result) in enumerate(zip(parts, results, strict=True)):
        asked, answered = [request.request_id for request in part], [request_id for request_id, _ in result]
        if sorted(asked) != sorted(answered):
            raise RolloutError(
                f"asked for requests {asked[:8]}, answered {answered[:8]}", where=f"rollout replica {replica}"
            )
        expected = {request.request_id: num_samples(request, n) for request in part}
        for request_id, completions in result:
            if len(completions) != expected[request_id]:
                raise RolloutError(
                    f"request {request_id} has {len(completions)} samples, expected {expected[request_id]}",
                    where=f"rollout replica {replica}",
                )
            samples[request_id] = completions
    return samples


def num_samples(request: Request, n: int) -> int:
    """Samples of a request in a call that asks for ``n``."""
    return 1 if request.is_greedy else n


def _group(request: Request) -> tuple[str, int]:
    return ("request", request.request_id) if request.group_id is None else ("group", request.group_id)
