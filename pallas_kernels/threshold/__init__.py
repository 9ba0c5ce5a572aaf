# SPDX-License-Identifier: Apache-2.0
"""How far up the masses of a row add up to no more than so much: see `api.threshold`."""
