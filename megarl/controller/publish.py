"""Publishing the actor's weights to the engines, and who holds the device meanwhile.

Colocated roles on GPUs take turns: training state lies in host memory while engines sample, engines are asleep while
training runs. Both hold the device only during a weight update, when the weights move from one to the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import ray

from megarl.config.schema.roles import RolloutConfig, SyncConfig
from megarl.controller.dispatch import Member, Watch, WorkerGroup
from megarl.controller.value_check import ValueCheck
from megarl.observability.metrics import Last, Metrics
from megarl.train.engine import Moved
from megarl.weights.schedule import HOST, WIRE
from megarl.weights.sync import Call, SyncOptions, SyncSession

# The protocol ends an update at its time-out by itself and says which rank was waiting for what; the driver waits
# longer, so that its own, less telling time-out comes second.
MARGIN_S = 30.0

MIB = 2**20


class DeviceTurns:
    """Hands the device from training to the engines and back; does nothing where they do not share it.

    Args:
        is_shared: whether roles take turns.
        training: worker groups of the roles that train.
        engines: rollout engines.
        watch: waits for the engines.
    """

    def __init__(
        self, is_shared: bool, training: Sequence[WorkerGroup], engines: Sequence[Member], watch: Watch
    ) -> None:
        self._is_shared = is_shared
        self._training = list(training)
        self._engines = list(engines)
        self._watch = watch
        self.engines_hold_weights = False
        self._is_training = False
        self._measured: Metrics = {}

    def to_training(self) -> None:
        """After sampling: engines give their memory back, training state returns; nothing to do if it has."""
        if self._is_shared and not self._is_training:
            self._is_training = True
            self._watch.get({member.handle.sleep.remote(): member for member in self._engines})
            self.engines_hold_weights = False
            moved = [_slowest(group.onload()) for group in self._training]
            self._measured |= {
                "offload/to_device_bytes": Last(sum(one.num_bytes for one in moved)),
                "offload/to_device_s": Last(sum(one.seconds for one in moved)),
            }

    def before_update(self) -> None:
        """Before a weight update: engines take memory for weights again."""
        if self._is_shared and not self.engines_hold_weights:
            self._watch.get({member.handle.wake_up.remote(["weights"]): member for member in self._engines})

    def to_sampling(self) -> None:
        """After a weight update: training state leaves, engines take memory for their caches."""
        if self._is_shared:
            moved = [_slowest(group.offload()) for group in self._training]
            self._measured |= {
                "offload/to_host_bytes": Last(sum(one.num_bytes for one in moved)),
                "offload/to_host_s": Last(sum(one.seconds for one in moved)),
            }
            tags = ["kv_cache"]
            self._watch.get({member.handle.wake_up.remote(tags): member for member in self._engines})
        self.engines_hold_weights = True
        self._is_training = False

    def metrics(self) -> Metrics:
        """Bytes and seconds of the latest moves of training state; empty where nobody takes turns."""
        return dict(self._measured)


def _slowest(ranks: Sequence[Moved]) -> Moved:
    return Moved(max(rank.num_bytes for rank in ranks), max(rank.seconds for rank in ranks))


class WeightPublisher:
    """Brings the actor's weights into every engine under a version (``weights/sync.py`` has the protocol)."""

    def __init__(
        self,
        actor: WorkerGroup,
        engines: Sequence[Member],
        rollout: RolloutConfig,
        config: SyncConfig,
        turns: DeviceTurns,
        watch: Watch,
        values: ValueCheck | None = None,
    ) -> None:
        self._actor = actor
        self._watch = watch
        self._turns = turns
        self._values = values
        self._session = SyncSession(
            actor.members,
            list(engines),
            self._invoke,
            host=ray.util.get_node_ip_address(),
            ranks_per_receiver=rollout.tp,
            options=SyncOptions(
                bucket_bytes=config.bucket_mib * MIB,
                timeout_s=config.timeout_s,
                verify=config.verify != "off",
                checksum_every=config.checksum_every,
                transport=config.transport,
                in_flight=config.in_flight,
            ),
        )
        self._last: Metrics = {}

    def publish(self, version: int) -> int:
        """Returns the version after every engine committed it.

        Raises:
            SyncError: the update failed; no engine samples until a later one succeeds.
        """
        self._turns.before_update()
        # A collective of all ranks, which the session cannot start: it calls only those that send.
        self._actor.gather_weights()
        if self._values is None:
            report = self._session.publish(version)
            self._turns.to_sampling()
        else:
            self._values.ask_trainer()
            report = self._session.publish(version, lambda: self._compare(version))
        self._last = {
            "weight_sync/bytes": Last(report.num_bytes),
            "weight_sync/send_s": Last(report.send_seconds),
            "weight_sync/load_s": Last(report.load_seconds),
            "weight_sync/total_s": Last(report.seconds),
        }
        if self._values is not None:
            self._last |= self._values.metrics
        if (chosen := self._session.schedule) is not None:
            self._last |= {
                "weight_sync/host_links": Last(chosen.num_links(HOST)),
                "weight_sync/network_links": Last(chosen.num_links(WIRE)),
            }
        return version

    def _compare(self, version: int) -> None:
        assert self._values is not None
        self._turns.to_sampling()
        self._values.ask_engines(version)

    def metrics(self) -> Metrics:
        """Bytes and seconds of the latest update."""
        return self._last

    def _invoke(self, calls: Sequence[Call], timeout_s: float) -> list[object]:
        refs = {getattr(call.target.handle, call.method).remote(*call.args): call.target for call in calls}
        return self._watch.get(refs, timeout_s + MARGIN_S)
