# SPDX-License-Identifier: Apache-2.0
"""What every room stands on: settings, checks, errors, types, and how work is told."""
