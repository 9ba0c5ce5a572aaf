# SPDX-License-Identifier: Apache-2.0
"""What a step costs on this machine, and the method to which that leads."""

from tsjax.host.costs import choose_method
from tsjax.methods.auto import Choice
from tsjax.methods.cost_model import Costs, Int8Costs, Line

__all__ = ["Choice", "Costs", "Int8Costs", "Line", "choose_method"]
