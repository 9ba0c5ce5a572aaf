# SPDX-License-Identifier: Apache-2.0
"""JSON files with presets, read by `tsjax.presets`; installed as ``tsjax.configs``."""
