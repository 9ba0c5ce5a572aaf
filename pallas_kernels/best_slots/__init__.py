# SPDX-License-Identifier: Apache-2.0
"""Which slots of a cache have the highest scores: see `api.best_slots`."""
