# SPDX-License-Identifier: Apache-2.0
"""Tests of experiments run as the others do, where they are named: `pytest experiments`."""

pytest_plugins = ["tests.conftest"]
