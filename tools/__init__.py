# SPDX-License-Identifier: Apache-2.0
"""Commands for those who work on tsjax itself."""
