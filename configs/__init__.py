# SPDX-License-Identifier: Apache-2.0
"""Preset configurations, one JSON file each; installed as ``tsjax.configs``."""
