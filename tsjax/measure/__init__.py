# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint takes on a machine, and what the machine allows: serves no call of generate."""
