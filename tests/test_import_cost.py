# SPDX-License-Identifier: Apache-2.0
"""``import tsjax`` loads JAX and little else."""

import subprocess
import sys

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


def said(code: str) -> list[str]:
    """The words that a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_heavy_packages_stay_unloaded_and_no_backend_starts():
    """The caller sets platforms and device counts after the import, before the first array."""
    code = (
        f"import sys, tsjax, pallas_kernels; print(*(m for m in {HEAVY} if m in sys.modules));"
        "import tsjax_convert; print('torch' in sys.modules);"
        "import jax; jax.config.update('jax_num_cpu_devices', 3); print(len(jax.devices('cpu')))"
    )
    assert said(code) == ["False", "3"]


def test_text_of_the_embedded_model_needs_no_heavy_package():
    code = (
        "import sys, tsjax; model = tsjax.load(tsjax.EMBEDDED);"
        "chunks = tsjax.stream(model, 'Once', max_new_tokens=1);"
        "assert isinstance(next(chunks).text[0], str);"
        f"print(*(m for m in {HEAVY} if m in sys.modules))"
    )
    assert said(code) == ["safetensors"]
