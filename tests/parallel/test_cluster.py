"""Which process this is, by flags and by the environment of each kind of cluster."""

import socket
import sys
import types

import jax
import pytest
from jax._src.clusters import cloud_tpu_cluster, k8s_cluster

from tformer_jax.config import ConfigError, ParallelConfig
from tformer_jax.parallel import cluster, multihost
from tformer_jax.parallel.cluster import Place

SLURM = {
    "SLURM_JOB_ID": "4096",
    "SLURM_STEP_NODELIST": "node[003-004],fast1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
CLOUD_TPU = {"TPU_WORKER_HOSTNAMES": "localhost,10.0.0.2", "TPU_WORKER_ID": "1"}
MEGASCALE = dict.fromkeys(("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"), "")
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1", "HOSTNAME": "localhost"}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in (*SLURM, *OPEN_MPI, *CLOUD_TPU, *MEGASCALE, *KUBERNETES, "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def found_in(monkeypatch, environment: dict[str, str]) -> Place | None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return cluster.find(None, None, None, seconds=1)


def test_a_laptop_trains_alone(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: pytest.fail("nothing is to be initialised"))
    assert cluster.find(None, None, None, seconds=1) is None
    assert cluster.find(None, 1, None, seconds=1) is None
    with multihost.start(ParallelConfig(), None) as processes:
        assert (processes.number, processes.count, processes.first) == (0, 1, True)


def test_slurm(monkeypatch):
    assert found_in(monkeypatch, SLURM) == Place("node003:61440", 4, 2, (0,))
    assert cluster.hosts() == "node[003-004],fast1"
    assert found_in(monkeypatch, {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None


def test_flags_go_before_the_cluster(monkeypatch):
    found_in(monkeypatch, SLURM)
    assert cluster.find("here:1", 2, 1, seconds=1) == Place("here:1", 2, 1)
    assert cluster.find(None, 1, None, seconds=1) is None


def test_open_mpi(monkeypatch):
    assert found_in(monkeypatch, OPEN_MPI) == Place("10.96.0.1:61441", 2, 1, (1,))


def test_cloud_tpu(monkeypatch):
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    assert found_in(monkeypatch, {**CLOUD_TPU, **MEGASCALE}) == Place("localhost:8482", 2, 1)
    assert found_in(monkeypatch, {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}) is None


def space(**values) -> types.SimpleNamespace:
    return types.SimpleNamespace(**values)


@pytest.fixture
def kubernetes(monkeypatch):
    """The answers of a cluster's interface about a job of three pods."""
    pod = space(
        metadata=space(name="job-1", labels={"job-name": "job"}, owner_references=[space(controller=True, kind="Job")]),
        spec=space(subdomain="pods"),
    )
    job = space(metadata=space(name="job", labels={}), spec=space(parallelism=3))
    core = space(list_namespaced_pod=lambda **_: space(items=[pod]))
    batch = space(read_namespaced_job=lambda **_: job)
    client = space(
        CoreV1Api=lambda: core, BatchV1Api=lambda: batch, exceptions=space(ApiException=type("E", (Exception,), {}))
    )
    interface = space(config=space(load_incluster_config=lambda: None), client=client)
    monkeypatch.setitem(sys.modules, "kubernetes", interface)
    monkeypatch.setattr(k8s_cluster.K8sCluster, "_namespace", lambda: "default")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")


def test_kubernetes(monkeypatch, kubernetes):
    assert found_in(monkeypatch, KUBERNETES) == Place("job-0.pods:55527", 3, 1)


def test_a_pod_of_no_indexed_job_trains_alone(monkeypatch, kubernetes):
    assert found_in(monkeypatch, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None


def test_a_cluster_that_says_too_little(monkeypatch):
    with pytest.raises(ConfigError, match="the cluster does not say which process this is .*--processes 1"):
        found_in(monkeypatch, {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "many"})


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("here:1", None, None), "needs --coordinator HOST:PORT, --processes N and --process I, all three"),
        ((None, 2, 0), "needs --coordinator HOST:PORT, --processes N and --process I, all three"),
        (("here:1", 2, 2), "--process 2 is none of the 2 processes, whose numbers are 0 to 1"),
        (("here:1", 2, -1), "--process -1 is none of the 2 processes"),
        (("here", 2, 0), "--coordinator 'here' must read HOST:PORT, such as node1:9876"),
        (("here:99999", 2, 0), "--coordinator 'here:99999' must read HOST:PORT"),
    ],
)
def test_mistakes_in_flags(flags, sentence):
    with pytest.raises(ConfigError, match=sentence):
        cluster.find(*flags, seconds=1)


def test_jax_is_told_what_was_found(monkeypatch):
    told = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: told.update(given))
    before = jax.config.jax_enable_preemption_service
    multihost.connect(Place("node003:61440", 4, 2, (0,)), None, lost_seconds=10)
    jax.config.update("jax_enable_preemption_service", before)
    assert (told["coordinator_address"], told["num_processes"], told["process_id"]) == ("node003:61440", 4, 2)
    assert told["local_device_ids"] == (0,)
    assert told["cluster_detection_method"] == "deactivate"
    assert told["heartbeat_timeout_seconds"] > 10
