# SPDX-License-Identifier: Apache-2.0
"""How much a query attends to each slot of a committed cache: see `api.cache_scores`."""
