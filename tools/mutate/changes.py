# SPDX-License-Identifier: Apache-2.0
"""All changes. The default suite has to notice each of them."""

from __future__ import annotations

from tools.mutate.change import Change as Change
from tools.mutate.of_drafts import OF_DRAFTS
from tools.mutate.of_models import OF_MODELS
from tools.mutate.of_runs import OF_RUNS
from tools.mutate.of_steps import OF_STEPS

CHANGES = (*OF_STEPS, *OF_MODELS, *OF_DRAFTS, *OF_RUNS)
