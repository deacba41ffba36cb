"""Which process of how many this is: as the command line says, or as the environment of a cluster does."""

import dataclasses
import os

from jax._src.clusters import ClusterEnv

from tformer_jax.config import ConfigError

FLAGS = "--coordinator HOST:PORT, --processes N and --process I"
INDEXED = "JOB_COMPLETION_INDEX"
"""Kubernetes sets it in the pods of indexed Jobs and JobSets."""
HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "TPU_WORKER_HOSTNAMES")
"""Variables that list the hosts of a job."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of this process among all that train together."""

    coordinator: str
    """HOST:PORT of process 0."""
    processes: int
    process: int
    local_devices: tuple[int, ...] | None = None
    """The devices of its host that are its own; None: all."""

    def __post_init__(self) -> None:
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(f"--coordinator {self.coordinator!r} must read HOST:PORT, such as node1:9876")
        if not 0 <= self.process < self.processes:
            raise ConfigError(
                f"--process {self.process} is none of the {self.processes} processes, whose numbers are 0 to "
                f"{self.processes - 1}"
            )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of process 0."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def find(coordinator: str | None, processes: int | None, process: int | None, seconds: int) -> Place | None:
    """What the flags say, or without any, the environment; None: this process trains alone.

    Args:
        seconds: how long to wait for a cluster that does not know the address of process 0 yet.

    Raises:
        ConfigError: the flags are incomplete or contradict each other, or a cluster does not say enough.
    """
    given = (coordinator, processes, process)
    if given in ((None, None, None), (None, 1, None), (None, 1, 0)):
        return None if processes == 1 else detect(seconds)
    if coordinator is None or processes is None or process is None:
        raise ConfigError(f"training over several processes needs {FLAGS}, all three of them; --processes 1: alone")
    place = Place(coordinator, processes, process)
    return place if processes > 1 else None


def detect(seconds: int) -> Place | None:
    """What Slurm, Open MPI, Kubernetes or Cloud TPU say of this process, by JAX's own detection.

    Raises:
        ConfigError: this is such a cluster, and it does not say all.
    """
    try:
        cluster = next((kind for kind in ClusterEnv._cluster_types if _is_here(kind)), None)
        if cluster is None or (processes := cluster.get_process_count()) <= 1:
            return None
        port = os.environ.get("JAX_COORDINATOR_PORT")
        coordinator = os.environ.get("JAX_COORDINATOR_ADDRESS") or cluster.get_coordinator_address(seconds, port)
        local = None if "tpu" in cluster.name else cluster.get_local_process_id()
        return Place(coordinator, processes, cluster.get_process_id(), None if local is None else (local,))
    except Exception as error:  # clusters raise whatever their libraries do
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"the cluster does not say which process this is ({reason}); write {FLAGS}, or --processes 1"
        ) from error


def hosts() -> str | None:
    """The hosts of this job as its cluster lists them, where it does."""
    return next((os.environ[name] for name in HOSTS if name in os.environ), None)


def _is_here(kind: type[ClusterEnv]) -> bool:
    if kind.opt_in_only_method or (kind.__name__ == "K8sCluster" and INDEXED not in os.environ):
        return False
    return kind.is_env_present()
