# SPDX-License-Identifier: Apache-2.0
"""For other engines: the exact sampler, and the judge of drafts."""

# ruff: noqa: I001
from tsjax.decoding.blocks import sample, verify, Verified, token_noise, warped_logits

__all__ = ["sample", "verify", "Verified", "token_noise", "warped_logits"]
