# SPDX-License-Identifier: Apache-2.0
"""What a pruned prompt costs in accuracy, without a network: tasks, a small model, plots."""
