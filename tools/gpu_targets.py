# SPDX-License-Identifier: Apache-2.0
"""GPUs that programs are lowered and compiled for on a machine without one."""

from __future__ import annotations

import contextlib
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh

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


def abstract_gpu(target: str):
    """A context to lower in: from jax 0.11 on, Pallas asks the mesh for the GPU."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    capability = "8.0" if target == "a100" else "9.0"

    class Device(jax.sharding.AbstractDevice):
        compute_capability = capability

    device = Device(device_kind=KINDS[target], num_cores=CORES[target], platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
