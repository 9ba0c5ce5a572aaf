# SPDX-License-Identifier: Apache-2.0
"""The model: what a pass is. Weights, layers, caches, and how rows run through them."""
