# SPDX-License-Identifier: Apache-2.0
"""Programs for a checkout, run from its root as ``python -m tools.NAME``. No wheel holds them.

aot compiles for GPUs that are not there, embedded_model and longcontext_model train small models,
record_acceptance and record_goldens write what tests compare with, wheel_smoke checks a wheel.
"""
