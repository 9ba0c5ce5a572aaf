# SPDX-License-Identifier: Apache-2.0
"""The commands of `tsjax`, a file each; what they share is in arguments.py."""
