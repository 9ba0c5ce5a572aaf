# SPDX-License-Identifier: Apache-2.0
"""JSON files with presets, read by `tsjax.preset`; installed as ``tsjax.configs``."""
