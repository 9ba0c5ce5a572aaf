# SPDX-License-Identifier: Apache-2.0
"""Measurements of tsjax, run from the root of a checkout: ``python -m benchmarks`` lists them."""
