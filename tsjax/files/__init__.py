# SPDX-License-Identifier: Apache-2.0
"""What lies on disk: checkpoints, weights, tokenizers, presets."""
