# SPDX-License-Identifier: Apache-2.0
"""The host side: requests, runs, results, interrupts."""
