# SPDX-License-Identifier: Apache-2.0
"""GPUs that programs are lowered and compiled for on a machine without one."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractMesh

from pallas_kernels import device

FOLDER = Path(__file__).resolve().parent / "targets"
KINDS = {"a100": "NVIDIA A100-SXM4-80GB", "h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}
CORES = {"a100": 108, "h100": 132, "h200": 132}


def devices(target: str, count: int = 1):
    """Devices to compile for; nothing runs on them. Needs the CUDA plugin, no CUDA libraries."""
    config = (FOLDER / f"{target}.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=config, topology=f"1x{count}x1"
    )
    return topology.devices


def shapes_on(target: str):
    """A function of an array, or of what else has a shape and a type: it, lying on that GPU."""
    sharding = jax.sharding.SingleDeviceSharding(devices(target)[0])

    def aval(x):
        kind = jnp.dtype(x.dtype) if isinstance(x.dtype, str) else x.dtype  # some are of keys
        return jax.ShapeDtypeStruct(x.shape, kind, sharding=sharding)

    return aval


CAPABILITIES = {"a100": 8.0, "h100": 9.0, "h200": 9.0}


def chip(target: str) -> device.Gpu:
    return device.Gpu(KINDS[target], CORES[target], CAPABILITIES[target])


@contextlib.contextmanager
def abstract_gpu(target: str):
    """A context to lower in: kernels are cut as on that GPU, by what was measured on it. From jax
    0.11 on, Pallas asks the mesh for the GPU."""
    with device.assumed(chip(target)), _abstract_mesh(chip(target)):
        yield


def lowered(target: str, program, *arguments, **more):
    """A jitted function, lowered for that GPU."""
    with abstract_gpu(target), warnings.catch_warnings():
        # The way out when the backend goes is in docs/kernels.md.
        warnings.filterwarnings(
            "ignore", "The Pallas Triton backend is deprecated", DeprecationWarning
        )
        return program.trace(*arguments, **more).lower(lowering_platforms=("cuda",))


def _abstract_mesh(chip: device.Gpu):
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()

    class Device(jax.sharding.AbstractDevice):
        compute_capability = str(chip.capability)

    one = Device(device_kind=chip.kind, num_cores=chip.cores, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=one))
