# SPDX-License-Identifier: Apache-2.0
"""``import tsjax`` loads JAX and little else."""

import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "transformers",
    "orbax",
    "optax",
    "safetensors",
    "huggingface_hub",
    "tqdm",
    "matplotlib",
)


@pytest.mark.parametrize(
    ("name", "unwanted"),
    [("tsjax", HEAVY), ("pallas_kernels", HEAVY), ("tsjax_convert", ("torch",))],
)
def test_heavy_packages_stay_unloaded(name: str, unwanted: tuple[str, ...]) -> None:
    code = f"import sys, {name}; print(*(m for m in {unwanted} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_import_starts_no_backend() -> None:
    # The caller sets platforms and device counts after the import, before the first array.
    code = (
        "import jax, tsjax, pallas_kernels; jax.config.update('jax_num_cpu_devices', 3);"
        "print(len(jax.devices('cpu')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3"]


def test_text_of_the_embedded_model_needs_no_heavy_package() -> None:
    code = (
        "import sys, tsjax; model = tsjax.load(tsjax.EMBEDDED);"
        "chunks = tsjax.stream(model, 'Once', max_new_tokens=1);"
        "assert isinstance(next(chunks).text[0], str);"
        f"print(*(m for m in {HEAVY} if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["safetensors"]
