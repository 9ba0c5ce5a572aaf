# SPDX-License-Identifier: Apache-2.0
"""The PTX of a kernel, executed in NumPy: what the GPU's assembler gets, where there is no GPU."""

from experiments.ptx.machine import execute as execute
from experiments.ptx.memory import Array as Array
