# SPDX-License-Identifier: Apache-2.0
"""The gate of a feed-forward layer: see `api.gated`."""
