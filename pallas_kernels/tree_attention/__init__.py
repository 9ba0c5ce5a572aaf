# SPDX-License-Identifier: Apache-2.0
"""Attention of T rows to a committed cache and to one another: see `api.tree_attention`."""
