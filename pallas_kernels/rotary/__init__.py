# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values out of one product, with rotary embedding: see `api.rotary_heads`."""
