"""A real Slurm of several nodes on this machine, in a folder of its own, from the daemons the system has installed.

Every node daemon is this machine; GPUs are character devices that nothing computes on. Daemons are ended by their own
process-id files.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil

DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol")

CONFIGURATION = """
ClusterName=megarltest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={run}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
GresTypes=gpu
KillWait=30
SlurmdTimeout={daemon_timeout_s}
SlurmdParameters=config_overrides
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs={cpus} RealMemory=4000 \\
  Gres=gpu:8
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def why_not() -> str | None:
    """Reason a cluster cannot be started here, or None."""
    path = _path()
    missing = [name for name in DAEMONS if shutil.which(name, path=path) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)} missing; Debian: slurm-wlm, munge)"
    if os.geteuid() != 0:
        return "starting Slurm's daemons needs root"
    return None


def _path() -> str:
    return os.environ["PATH"] + ":/usr/sbin:/sbin"


def _free_ports(count: int) -> int:
    """First of ``count`` consecutive free ports."""
    for first in range(17_000, 19_900, count):
        sockets = []
        try:
            for port in range(first, first + count):
                probe = socket.socket()
                sockets.append(probe)
                probe.bind(("", port))
            return first
        except OSError:
            continue
        finally:
            for probe in sockets:
                probe.close()
    raise RuntimeError("no free ports for Slurm's daemons")


class SlurmCluster:
    """Started on entry, ended on exit; ``environment`` makes Slurm's commands use it.

    Args:
        root: its folder.
        nodes: node daemons.
        cpus: of a node.
        daemon_timeout_s: after how long a node whose daemon is silent is down.
    """

    def __init__(self, root: Path, *, nodes: int = 4, cpus: int = 2, daemon_timeout_s: int = 300) -> None:
        self.root, self.nodes, self.cpus, self.daemon_timeout_s = root, nodes, cpus, daemon_timeout_s
        self.run_dir = root / "run"
        self._orphans: set[int] = set()
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(root / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        for name in ("state", "spool", "run", "log"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        for folder in (self.root, *self.root.parents):
            if folder.stat().st_uid == os.geteuid() and folder != Path("/") and not folder.stat().st_mode & 0o001:
                folder.chmod(folder.stat().st_mode | 0o055)
        for index in range(8):
            os.mknod(self.run_dir / f"gpu{index}", 0o020666, os.makedev(1, 3))
        first = _free_ports(self.nodes + 1)
        (self.root / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname(),
                port=first,
                first=first + 1,
                last=first + self.nodes,
                nodes=self.nodes,
                cpus=self.cpus,
                daemon_timeout_s=self.daemon_timeout_s,
                root=self.root,
                run=self.run_dir,
            )
        )
        names = [f"n{index}" for index in range(1, self.nodes + 1)]
        gres = "".join(f"NodeName={name} Name=gpu File={self.run_dir}/gpu[0-7]\n" for name in names)
        (self.root / "gres.conf").write_text(gres)
        try:
            self._start_daemons(names)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start_daemons(self, names: list[str]) -> None:
        munge = pwd.getpwnam("munge")
        key = self.run_dir / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for path in (key, self.run_dir):
            os.chown(path, munge.pw_uid, munge.pw_gid)
        self.run_dir.chmod(0o755)
        self._command(
            ["runuser", "-u", "munge", "--", shutil.which("munged", path=_path()) or "munged", f"--key-file={key}",
             f"--socket={self.run_dir}/munge.sock", f"--pid-file={self.run_dir}/munged.pid", "--force",
             f"--log-file={self.run_dir}/munged.log", f"--seed-file={self.run_dir}/munge.seed"]
        )  # fmt: skip
        self._command(["slurmctld"])
        for name in names:
            self._command(["slurmd", "-N", name])
        self.wait_for(lambda: self._command(["sinfo", "-h", "-t", "idle", "-o", "%D"]).strip() == str(len(names)), 30)

    def __exit__(self, *unused: object) -> None:
        pids = []
        for path in (
            *sorted(self.run_dir.glob("slurmd-*.pid")),
            self.run_dir / "slurmctld.pid",
            self.run_dir / "munged.pid",
        ):
            if path.is_file() and (text := path.read_text().strip()):
                pids.append(int(text))
        for pid in pids:
            _kill(pid, 15)
        end = time.monotonic() + 10
        while any(_kill(pid, 0) for pid in pids) and time.monotonic() < end:
            time.sleep(0.1)
        for pid in (*pids, *self._orphans):
            _kill(pid, 9)

    def _command(self, command: list[str], attempts: int = 1) -> str:
        for attempt in range(1, attempts + 1):
            result = subprocess.run(
                command, env=self.environment, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
            )
            if result.returncode == 0:
                return result.stdout
            time.sleep(2 * (attempt < attempts))
        raise RuntimeError(f"{command[0]} failed: {result.stderr or result.stdout}")

    @staticmethod
    def wait_for(condition: object, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not condition():  # type: ignore[operator]
            if time.monotonic() > end:
                raise TimeoutError(f"not within {timeout_s} s")
            time.sleep(0.2)

    def sbatch(self, script: Path, *arguments: str, options: tuple[str, ...] = (), cwd: Path | None = None) -> int:
        """Submit; returns the job id."""
        command = ["sbatch", "--parsable", *options, str(script), *arguments]
        result = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, cwd=cwd, check=True
        )
        return int(result.stdout.strip().split(";")[0])

    def state(self, job: int) -> dict[str, str]:
        """Fields of ``scontrol show job``, such as JobState and ExitCode."""
        # Munge gives a request two seconds, which is little where the tests themselves keep the machine busy.
        text = self._command(["scontrol", "show", "job", "-o", str(job)], attempts=5)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def finished(self, job: int, timeout_s: float) -> dict[str, str]:
        """Wait for the end of a job and return its fields."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_for(lambda: self.state(job)["JobState"] in ended, timeout_s)
        return self.state(job)

    def cancel(self, job: int) -> None:
        self._command(["scancel", str(job)])

    def signal(self, job: int, name: str) -> None:
        """Send a signal to the batch script, as Slurm does before a time limit (``--signal=B:``)."""
        self._command(["scancel", "--batch", f"--signal={name}", str(job)])

    def announce_limit(self, job: int, lead_minutes: int) -> None:
        """Shorten a running job's time limit until Slurm, within half a minute, sends the signal of ``--signal``."""
        hours, minutes, _ = self.state(job)["RunTime"].split(":")
        limit = 60 * int(hours) + int(minutes) + lead_minutes
        self._command(["scontrol", "update", f"JobId={job}", f"TimeLimit={limit}"])

    def lose(self, name: str) -> None:
        """End a node as a power cut would: its daemon, Slurm's processes for its steps, and all that they started."""
        daemon = int((self.run_dir / f"slurmd-{name}.pid").read_text())
        there = [process for process in psutil.process_iter() if self._is_on(process, name)]
        steps = {step.pid for process in there if (step := _step_of(process)) is not None}
        pids = (daemon, *steps, *(process.pid for process in there))
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: none sees another one die
            for pid in pids:
                _kill(pid, number)

    def _is_on(self, process: psutil.Process, node: str) -> bool:
        """Whether a process of a job runs on the node of this cluster; other clusters use the same names."""
        try:
            variables = process.environ()
        except psutil.Error:
            return False
        return (variables.get("SLURMD_NODENAME"), variables.get("SLURM_CONF")) == (node, self.environment["SLURM_CONF"])

    def kill_daemon(self, name: str) -> None:
        """Kill a node's daemon alone: Slurm's processes for its steps, and all that they started, live on.

        What waits for the daemon to come back is ended with the cluster.
        """
        there = [process for process in psutil.process_iter() if self._is_on(process, name)]
        self._orphans |= {step.pid for process in there if (step := _step_of(process)) is not None}
        os.kill(int((self.run_dir / f"slurmd-{name}.pid").read_text()), signal.SIGKILL)

    def bring_back(self, name: str) -> None:
        """Start the daemon of a lost node again."""
        self._command(["slurmd", "-N", name])

    def start_now(self, job: int) -> None:
        """Let a requeued job start at once: Slurm makes it wait two minutes."""
        self._command(["scontrol", "update", f"JobId={job}", "StartTime=now"])


def _step_of(process: psutil.Process) -> psutil.Process | None:
    """The process of Slurm's that started it."""
    try:
        return next((one for one in process.parents() if one.name().startswith("slurmstepd")), None)
    except psutil.Error:
        return None


def _kill(pid: int, number: int) -> bool:
    """Send a signal; False if the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
