# SPDX-License-Identifier: Apache-2.0
"""The numbers of quantised blocks, as GGUF files store them: see `api.widened`."""
