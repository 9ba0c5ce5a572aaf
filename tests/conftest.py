# SPDX-License-Identifier: Apache-2.0
"""Quick compilation, four CPU devices for the sharding tests, and the hypothesis profile."""

import atexit
import contextlib
import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
import shape_checks

try:
    import hypothesis
except ImportError:  # a GPU machine needs it for nothing: pytest -m gpu tests/test_on_gpu.py
    hypothesis = None

QUICK_XLA = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
# jax 0.12 knows this one no more.
FUSION = "--xla_cpu_use_fusion_emitters=false"

# The shapes in the signatures of array code are checked at each call. A GPU machine does without.
# Modules that check their arguments themselves are left out: tests want to see their own errors.
if importlib.util.find_spec("jaxtyping") and importlib.util.find_spec("beartype"):
    import jaxtyping

    jaxtyping.install_import_hook(shape_checks.MODULES, "shape_checks.check")

# Read when the backend starts, so it is set before any test module is imported.
jax.config.update("jax_num_cpu_devices", 4)

# What tests compile is kept nowhere, also not by the commands that they start.
jax.config.update("jax_enable_compilation_cache", False)
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

# Nor what they measure. Kernels for the CPU are those of the user's cache folder.
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have the environment of the first process
    from pallas_kernels.cache_folder import cache_folder

    own = tempfile.mkdtemp(prefix="tsjax-tests-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    kernels = cache_folder() / "native" if cache_folder() else None
    with contextlib.suppress(OSError):
        if kernels is not None:
            kernels.mkdir(parents=True, exist_ok=True)
            os.symlink(kernels, os.path.join(own, "native"))
    os.environ["TSJAX_CACHE"] = own

# A trace makes many small objects. To look for rubbish among them often takes a tenth of the time.
gc.set_threshold(50_000, 20, 50)

# Jobs that a shell starts in the background ignore Ctrl-C, and what is ignored stays so: tests of
# signals, and the commands that they start, begin as in the foreground.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if hypothesis is not None:
    hypothesis.settings.register_profile("tsjax", deadline=None, derandomize="CI" in os.environ)
    hypothesis.settings.load_profile("tsjax")


def pytest_configure(config: pytest.Config) -> None:
    """Compiles the kernels before the workers start, if the user has none: once, not in each."""
    compile_quickly(config)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        from pallas_kernels import native  # not before its modules are hooked

        native.status(try_now=True)


def compile_quickly(config: pytest.Config) -> None:
    """Has XLA compile with less effort: most of the suite's time is programs that run once.

    The environment passes that on to what tests start, workers of pytest-xdist included. With
    another -m, and with XLA_FLAGS of your own (`XLA_FLAGS= pytest`), programs are compiled as
    users have them.
    """
    if "XLA_FLAGS" in os.environ or "not gpu and not aot" not in config.option.markexpr:
        return
    os.environ["XLA_FLAGS"] = next(
        filter(_known, (" ".join([*QUICK_XLA, FUSION]), " ".join(QUICK_XLA), ""))
    )


def _known(flags: str) -> bool:
    """A flag that an XLA doesn't know ends the process, so another one tries it."""
    probe = [sys.executable, "-c", "import jax; jax.devices('cpu')"]
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(probe, env=env, capture_output=True).returncode == 0


# The longest files, to begin with: workers that take whole files then end at about the same time.
LONGEST = (
    "pruning", "methods", "verification", "benchmarks", "generation", "x64", "kernels", "examples",
    "acceptance", "training", "embedded_training", "checkpoint", "bad_input", "longcontext",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        name = item.path.stem.removeprefix("test_")
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=turn)


MAPS = Path("/proc/self/maps")  # a line for each map of this process, which may have 65,530
MANY_MAPS = 15_000  # one test may add as many


def give_programs_back() -> None:
    """Each program keeps some memory maps; a process with too many ends in XLA, without a word."""
    jax.clear_caches()
    gc.collect()  # what is left in circles keeps them too


@pytest.fixture(autouse=True, scope="module")
def programs_of_a_module():
    yield
    give_programs_back()


@pytest.fixture(autouse=True)
def programs_of_a_long_module():
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        give_programs_back()


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """What `Auto` chooses does not depend on how busy the machine is: costs are the formula's."""

    def estimate(params, cfg, batch):
        return devices.estimated(cfg, devices.CPU, batch)

    from tsjax.host import costs
    from tsjax.methods import devices

    monkeypatch.setattr(costs, "measure", estimate)


@pytest.fixture(scope="module")
def strict_promotion():
    """Arrays of different types, or numbers of dimensions, do not meet unless the code says how."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
