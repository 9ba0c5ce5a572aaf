# SPDX-License-Identifier: Apache-2.0
"""Kernels in C++ for CPUs: how they are compiled, and what the operations' kernels share.

Each operation has its kernel in its own folder, native.cc, and how it is called in native.py.
"""

from pallas_kernels.native.build import Library as Library
from pallas_kernels.native.build import Status as Status
from pallas_kernels.native.build import all_rows as all_rows
from pallas_kernels.native.build import check_supported as check_supported
from pallas_kernels.native.build import cpu as cpu
from pallas_kernels.native.build import library as library
from pallas_kernels.native.build import on_host as on_host
from pallas_kernels.native.build import serves as serves
from pallas_kernels.native.build import status as status

__all__ = [
    "Library",
    "Status",
    "all_rows",
    "check_supported",
    "cpu",
    "library",
    "on_host",
    "serves",
    "status",
]
