# SPDX-License-Identifier: Apache-2.0
"""Named changes that break the library, and the command that asks whether the tests notice."""
