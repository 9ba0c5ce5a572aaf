# SPDX-License-Identifier: Apache-2.0
"""Products with weights of four and eight bits, each read once: see `api.narrow_product`."""
