# SPDX-License-Identifier: Apache-2.0
"""The packages of the distribution; everything else is in pyproject.toml.

``convert`` and ``configs`` are names too general for site-packages, so these folders are installed
as ``tsjax_convert`` and ``tsjax.configs``.
"""

from setuptools import find_packages, setup

RENAMED = {"tsjax_convert": "convert", "tsjax.configs": "configs"}

packages = find_packages(include=["tsjax", "tsjax.*", "pallas_kernels", "pallas_kernels.*"])
for name, folder in RENAMED.items():
    packages += [name, *(f"{name}.{child}" for child in find_packages(folder))]

setup(packages=packages, package_dir=RENAMED)
