"""A real Slurm on this machine for the tests: munged, slurmctld and two slurmd in a private folder, on private ports.

`python -m launchers.slurm_cluster FOLDER` (with tests/ on the path) starts one and prints its SLURM_CONF. It needs
Debian's `slurm-wlm` and `munge`, and root, as slurmd does.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from helpers.ports import Held

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
START_SECONDS = 60

CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,defer_batch,batch_sched_delay=0,sched_min_interval=0
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=20
MinJobAge={forget_seconds}
SlurmdTimeout=60
InactiveLimit=0
TmpFS={folder}/tmp
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port} CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 Gres=gpu:2 Feature=big State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second_port} CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 State=UNKNOWN
PartitionName=main Nodes=node1,node2 Default=YES MaxTime=INFINITE PriorityTier=1 State=UP
PartitionName=short Nodes=node1,node2 MaxTime=3 DefaultTime=3 PriorityTier=1 State=UP
PartitionName=closed Nodes=node1,node2 State=DOWN
PartitionName=urgent Nodes=node1,node2 MaxTime=INFINITE PriorityTier=10 State=UP
"""  # noqa: E501 - a node is a line


ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
"""

DATABASE_CONFIG = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=slurm
StoragePass=slurm
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
"""

GPUS = "NodeName=node1 Name=gpu File=/dev/null\nNodeName=node1 Name=gpu File=/dev/zero\n"
"""Devices that Slurm counts as GPUs: no test computes on them."""


def explain_absence() -> str:
    """Return why no Slurm can be started here; empty where it can."""
    missing = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    if missing:
        return f"no {', '.join(missing)} here: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "slurmd needs root"


def explain_absence_of_accounting() -> str:
    """Return why no accounting can be started here; empty where it can."""
    missing = [name for name in ("slurmdbd", "mariadbd") if not Path("/usr/sbin", name).exists()]
    return f"no {', '.join(missing)} here: apt-get install slurmdbd mariadb-server" if missing else ""


class SlurmCluster:
    """Context manager of a running cluster with the nodes `node1` and `node2`, and its commands.

    It forgets a job `forget_seconds` after its end; with accounting, `sacct` remembers it.
    """

    def __init__(
        self, folder: Path, proctrack: str = "pgid", forget_seconds: int = 300, accounting: bool = False
    ) -> None:
        self.folder = folder
        self._forget_seconds = forget_seconds
        self._accounting = accounting
        self.config_file = folder / "slurm.conf"
        self._proctrack = proctrack
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        with contextlib.ExitStack() as stack:
            stack.callback(self._stop_all)
            self._start_all()
            stack.pop_all()
        return self

    def _start_all(self) -> None:
        for name in ("state", "tmp", "spool-node1", "spool-node2"):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        self._start_munge()
        self._ports = {name: Held() for name in ("controller_port", "first_port", "second_port")}
        ports = {name: port.number for name, port in self._ports.items()}
        host = subprocess.check_output(["hostname", "-s"], text=True).strip()
        values = {"folder": self.folder, "host": host, "forget_seconds": self._forget_seconds, **ports}
        text = CONFIG.format(proctrack=self._proctrack, **values)
        if self._accounting:
            self._ports["database_port"], self._ports["port"] = Held(), Held()
            self._start_accounting(host, self._ports["database_port"].number, self._ports["port"].number)
            text = text.replace(
                "NodeName=", ACCOUNTING.format(folder=self.folder, port=self._ports["port"].number) + "NodeName=", 1
            )
        self.config_file.write_text(text)
        (self.folder / "gres.conf").write_text(GPUS)
        version = subprocess.check_output(["/usr/sbin/slurmctld", "-V"], text=True)
        if "22.05" not in version:  # a later one wants cgroups, unless this is said, which 22.05 does not know
            (self.folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        self.start_controller()
        for node in ("node1", "node2"):
            self.start_node(node)
        self._wait_for_nodes()

    def __exit__(self, *caught: object) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self.run("scancel", "--user=root")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.SubprocessError):
                if not self.run("squeue", "--noheader", "--states=RUNNING,COMPLETING").strip():
                    break
            time.sleep(0.5)
        self._stop_all()

    def _stop_all(self) -> None:
        for name in reversed(list(self._processes)):
            self.stop(name)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which Slurm's commands find this cluster."""
        return {"SLURM_CONF": str(self.config_file)}

    def run(self, *command: str) -> str:
        """Run one of Slurm's commands and return what it prints."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise subprocess.SubprocessError(f"{command}: {done.stderr}")
        return done.stdout

    def start_controller(self) -> None:
        """Start slurmctld; with jobs that an earlier one knew."""
        self._start("slurmctld", "/usr/sbin/slurmctld", "-D", "-f", str(self.config_file))

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self._start(node, "/usr/sbin/slurmd", "-D", "-N", node, "-f", str(self.config_file))

    def stop(self, name: str, number: int = signal.SIGTERM) -> None:
        """Stop `slurmctld`, `munged` or the slurmd of a node, and wait until it is gone."""
        process = self._processes.pop(name)
        process.send_signal(number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, **self.environment}
            )

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {"socket": "munge.socket", "seed-file": "seed", "log-file": "munge.log", "pid-file": "munge.pid"}
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self._start("munged", "/usr/sbin/munged", "-F", "--force", f"--key-file={key}", *options)
        deadline = time.monotonic() + START_SECONDS
        while not (self.folder / "munge.socket").exists():
            assert time.monotonic() < deadline, (self.folder / "munged.out").read_text()
            time.sleep(0.1)

    def _start_accounting(self, host: str, database_port: int, port: int) -> None:
        """Start MariaDB and slurmdbd, and make the cluster known there."""
        data, user = self.folder / "mariadb", f"--user={getpass.getuser()}"
        made = ["mariadb-install-db", "--no-defaults", f"--datadir={data}", user, "--skip-test-db"]
        subprocess.run(made, check=True, capture_output=True, timeout=START_SECONDS)
        allow = self.folder / "allow.sql"
        allow.write_text("GRANT ALL ON *.* TO 'slurm'@'127.0.0.1' IDENTIFIED BY 'slurm';\n")
        options = [f"--socket={self.folder}/mariadb.socket", "--bind-address=127.0.0.1", f"--port={database_port}"]
        limits = ["--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900", f"--init-file={allow}"]
        limits.append("--loose-innodb-snapshot-isolation=OFF")  # slurmdbd of 26.05 demands it of MariaDB 11
        self._start("mariadbd", "/usr/sbin/mariadbd", "--no-defaults", f"--datadir={data}", user, *options, *limits)
        settings = self.folder / "slurmdbd.conf"
        text = DATABASE_CONFIG.format(folder=self.folder, host=host, port=port, database_port=database_port)
        settings.write_text(text)
        settings.chmod(0o600)
        self._wait_for_port(database_port)
        # It reads slurmdbd.conf beside slurm.conf.
        self._start("slurmdbd", "/usr/sbin/slurmdbd", "-D")
        self._wait_for_port(port)

    def _wait_for_port(self, port: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                return
            assert time.monotonic() < deadline, self._read_logs()
            time.sleep(0.1)

    def _wait_for_nodes(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(subprocess.SubprocessError):
                states = self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split()
                if states == ["idle", "idle"]:
                    return
            assert time.monotonic() < deadline, self._read_logs()
            time.sleep(0.3)

    def _read_logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in self.folder.glob("*.[lo]*"))


if __name__ == "__main__":
    with SlurmCluster(Path(sys.argv[1])) as cluster:
        print(f"export SLURM_CONF={cluster.config_file}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
