# SPDX-License-Identifier: Apache-2.0
"""Rows over the root of their mean square: see `api.rms_norm`."""
