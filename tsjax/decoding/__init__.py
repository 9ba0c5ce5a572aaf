# SPDX-License-Identifier: Apache-2.0
"""The heart: one step of decoding, from a draft tree to committed tokens."""
