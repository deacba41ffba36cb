"""XLA flags that overlap computation and communication. This module does not import JAX, so that it loads quickly.

XLA aborts at unknown flags, and many flags become defaults over time. The GPU flags exist in jaxlib 0.10 with other
defaults, the TPU flags in libtpu 0.0.42. Tests check the GPU flags against the installed jaxlib.
"""

from collections.abc import Iterable
from typing import NamedTuple

VARIABLES = {"gpu": "XLA_FLAGS", "tpu": "LIBTPU_INIT_ARGS"}
"""The environment variable that each kind of device reads."""
ALWAYS = "always"
USES = (ALWAYS, "data", "fsdp", "tensor", "sequence", "expert")
"""The meshes that a flag is for: all, or meshes in which this axis is larger than 1."""


class Flag(NamedTuple):
    """An XLA flag, and the meshes that it is set for."""

    name: str
    value: str
    uses: tuple[str, ...]
    meaning: str

    def __str__(self) -> str:
        return f"--{self.name}={self.value}"


LAYER_BYTES = str(256 * 2**20)
"""Large enough for the messages of one layer; XLA's 30 MiB splits large layers' messages into many."""

FLAGS = {
    "gpu": (
        Flag(
            "xla_gpu_enable_latency_hiding_scheduler",
            "true",
            (ALWAYS,),
            "starts transfers early and ends them late, so that devices compute meanwhile; takes some memory",
        ),
        Flag(
            "xla_gpu_enable_pipelined_all_gather",
            "true",
            ("fsdp",),
            "with model.scan_layers: all-gathers of the next layer's parameters overlap with this layer's computation",
        ),
        Flag(
            "xla_gpu_enable_pipelined_all_reduce",
            "true",
            ("data", "expert"),
            "with model.scan_layers: all-reduces of a layer's gradients overlap with the computation of the next ones",
        ),
        Flag(
            "xla_gpu_all_gather_combine_threshold_bytes",
            LAYER_BYTES,
            ("fsdp",),
            "bytes of parameters in one all-gather: at least one layer's parameters",
        ),
        Flag(
            "xla_gpu_reduce_scatter_combine_threshold_bytes",
            LAYER_BYTES,
            ("fsdp",),
            "bytes of gradients in one reduce-scatter: at least one layer's gradients",
        ),
        Flag(
            "xla_gpu_all_reduce_combine_threshold_bytes",
            LAYER_BYTES,
            ("data", "expert"),
            "bytes of gradients in one all-reduce: more bytes use the bandwidth better, fewer overlap better",
        ),
        Flag(
            "xla_gpu_threshold_for_windowed_einsum_mib",
            "0",
            ("tensor",),
            "splits matrix products, so that sending one part overlaps with computing the next",
        ),
        Flag(
            "xla_gpu_use_memcpy_local_p2p",
            "true",
            ("sequence",),
            "GPUs of one process send keys and values by copies, which occupy no streaming multiprocessor",
        ),
    ),
    "tpu": (
        Flag(
            "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
            "true",
            ("data", "expert"),
            "all-reduces of gradients overlap with matrix products",
        ),
        Flag(
            "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter",
            "true",
            ("fsdp",),
            "reduce-scatters of gradients overlap with matrix products",
        ),
        Flag(
            "xla_tpu_enable_ici_ag_pipelining",
            "true",
            ("fsdp",),
            "with model.scan_layers: all-gathers of the next layer's parameters overlap with this layer's computation",
        ),
        Flag("xla_should_allow_loop_variant_parameter_in_chain", "enabled", ("fsdp",), "needed by the pipelining"),
        Flag("xla_should_add_loop_invariant_op_in_chain", "enabled", ("fsdp",), "needed by the pipelining"),
        Flag(
            "xla_tpu_enable_async_all_to_all",
            "true",
            ("expert",),
            "sending tokens to experts overlaps with the computation of others",
        ),
    ),
}
"""Flags by kind of device."""


def choose_flags(kind: str, axes: Iterable[str] = ()) -> tuple[Flag, ...]:
    """Returns the flags for a kind of device and a mesh whose axes larger than 1 are `axes`; (): one device."""
    wanted = {ALWAYS, *axes}
    return tuple(flag for flag in FLAGS[kind] if wanted & set(flag.uses))
