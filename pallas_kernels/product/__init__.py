# SPDX-License-Identifier: Apache-2.0
"""Products of rows with weights: see `api.product`."""
