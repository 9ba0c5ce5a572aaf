# SPDX-License-Identifier: Apache-2.0
"""JSON files with presets, read by `tsjax.preset` and `tsjax.model_preset`; installed as ``tsjax.configs``."""
