# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels under the compiler's sanitizers: memory, undefined behaviour, races."""

import pathlib
import subprocess

import jax
import pytest

from pallas_kernels.native import build

HERE = pathlib.Path(__file__).parent
COMPILER = build.find_compiler()
FLAGS = [flag for flag in build.FLAGS if flag != "-O3"]


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_the_kernels_are_clean(sanitizers, tmp_path):
    program = tmp_path / "program"
    include = ["-I", str(HERE.parent / "pallas_kernels"), "-isystem", jax.ffi.include_dir()]
    command = [COMPILER, *FLAGS, "-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover"]
    command += [*include, str(HERE / "native_sanitizers.cc"), "-o", str(program)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.slow
def test_the_sources_compile_for_avx512(tmp_path):
    flags = "-O1 -std=c++20 -march=x86-64-v3 -mavx512f -mavx2 -mfma".split()
    for name in build.sources():
        if name.endswith(".cc"):
            source = HERE.parent / "pallas_kernels" / name
            command = [COMPILER, *flags, "-c", str(source)]
            command += ["-isystem", jax.ffi.include_dir(), "-o", str(tmp_path / "object")]
            made = subprocess.run(command, capture_output=True, text=True)
            assert made.returncode == 0, made.stderr
