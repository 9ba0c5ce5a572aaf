# SPDX-License-Identifier: Apache-2.0
"""How the suite runs: workers and tiers, quick and kept compilation, four CPU devices, hypothesis.

What is chosen: without options the default tier; `-m wide` the full matrix; tests of kernels where
the kernels differ from those that were tested when they last changed (`kernels_tested.py`).
"""

import atexit
import contextlib
import gc
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import kernels_tested
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

# What tests measure is kept nowhere, nor what the commands compile that they start. Kernels for the
# CPU are those of the user's cache folder, where the programs of the tests lie as well.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have the environment of the first process
    from pallas_kernels.cache_folder import cache_folder

    own, users = tempfile.mkdtemp(prefix="tsjax-tests-"), cache_folder()
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    with contextlib.suppress(OSError):
        for kept in ("native", "programs-of-tests") if users else ():
            (users / kept).mkdir(parents=True, exist_ok=True)
            os.symlink(users / kept, os.path.join(own, kept))
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


WORKERS_NEED = 6 * 2**30  # bytes of memory that each may take


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n auto`: one for each core with memory; none, for one file or a GPU."""
    if _asks_for(config, "gpu") or len(_files(config)) == 1:
        return 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, memory // WORKERS_NEED))


def _asks_for(config: pytest.Config, mark: str) -> bool:
    return re.search(rf"(?<!not )\b{mark}\b", config.option.markexpr) is not None


def _files(config: pytest.Config) -> set[str]:
    """Those that the command line names."""
    return {name for name in (arg.split("::")[0] for arg in config.args) if name.endswith(".py")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels", choices=("changed", "yes", "no", "record"), default="changed",
        help="tests of kernels: where kernels changed since they were tested, always, never, or "
        "always and noted in tests/goldens/kernels_tested.json when all have passed",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Compiles the kernels before the workers start, if the user has none: once, not in each."""
    compile_quickly(config)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        from pallas_kernels import native  # not before its modules are hooked

        native.status(try_now=True)
    keep_programs()
    leave_works_untold()
    remember_no_plain_steps()


def leave_works_untold() -> None:
    """However slow the machine is, stderr has what a test waits for; see test_telling.py."""
    from tsjax.base import line_writer

    line_writer.SECONDS_UNTOLD = line_writer.SECONDS_BETWEEN = float("inf")


def remember_no_plain_steps() -> None:
    """Else a test's Auto would know how fast another test's run was; see test_measuring.py."""
    from tsjax.host import judge

    judge.STEPS_TO_KEEP = ()


MOST_KEPT = 2**30  # bytes
WORTH_KEEPING = 0.2  # seconds that XLA took


def keep_programs() -> None:
    """What tests compile is kept for other files, workers and runs, in the user's cache folder.

    With jax's own limit of its size each new program would look at all that are there, one process
    at a time: a third of a second for 8,000. So it begins anew when there is too much.
    """
    from tsjax.host import compilation

    folder = Path(os.environ["TSJAX_CACHE"], "programs-of-tests")
    if folder.is_dir():
        if "PYTEST_XDIST_WORKER" not in os.environ:
            kept = [path for path in folder.rglob("*") if path.is_file()]
            if sum(path.stat().st_size for path in kept) > MOST_KEPT:
                for path in kept:
                    path.unlink(missing_ok=True)
        compilation.enable_compilation_cache(folder)
        compilation.choose_folder(None)  # by jax alone: whole programs have tests of their own
        jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)


@pytest.fixture
def no_kept_programs():
    """For tests of the folder of programs itself, and of how long compiling takes."""
    from jax.experimental.compilation_cache import compilation_cache

    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


def compile_quickly(config: pytest.Config) -> None:
    """Has XLA compile with less effort: most of the suite's time is programs that run once.

    The environment passes that on to what tests start, workers of pytest-xdist included. For GPUs,
    and with XLA_FLAGS of your own (`XLA_FLAGS= pytest`), programs are compiled as
    users have them.
    """
    if "XLA_FLAGS" in os.environ or _asks_for(config, "gpu") or _asks_for(config, "aot"):
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
LONGEST = ("method_contract", "verification", "pruning", "meshes", "compilation")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        name = item.path.stem.removeprefix("test_")
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=turn)
    chosen = config.option.kernels
    if chosen == "changed" and (_files(config) or _asks_for(config, "kernels")):
        chosen = "yes"
    if chosen == "no" or (chosen == "changed" and kernels_tested.are_known()):
        left = {item for item in items if item.get_closest_marker("kernels")}
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.option.kernels == "record" and exitstatus == 0:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            kernels_tested.record()


MAPS = Path("/proc/self/maps")  # a line for each map of this process, which may have 65,530
MANY_MAPS = 15_000  # one test may add as many


@pytest.fixture(autouse=True)
def programs_are_given_back():
    """Each program keeps some memory maps; a process with too many ends in XLA, without a word."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()
        gc.collect()  # what is left in circles keeps them too


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """What `Auto` chooses does not depend on how busy the machine is: costs are the formula's."""

    def estimate(params, cfg, batch, longest):
        return devices.estimated(cfg, devices.CPU, batch)

    from tsjax.host import costs
    from tsjax.methods import devices

    monkeypatch.setattr(costs, "measure", estimate)


@pytest.fixture(scope="module")
def any_tree_has_a_name():
    """As saved runs name the method that goes on."""
    from any_tree import AnyTree

    import tsjax
    from tsjax.methods import METHODS

    tsjax.methods.register_method("any_tree", AnyTree)
    yield
    del METHODS["any_tree"]


@pytest.fixture(scope="module")
def strict_promotion():
    """Arrays of different types, or numbers of dimensions, do not meet unless the code says how."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
