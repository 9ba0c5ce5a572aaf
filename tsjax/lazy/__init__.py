# SPDX-License-Identifier: Apache-2.0
"""LazyLLM: layers that compute only the prompt tokens that matter."""
