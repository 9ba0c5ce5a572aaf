# SPDX-License-Identifier: Apache-2.0
"""tsjax: long text generation in JAX, with the same tokens as plain decoding.

The same in float32 and float64; in bfloat16 and float16 drafts may part from it at a near-tie.

The public names are those of public.py.
"""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

try:
    __version__ = _version("tsjax")
except _PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+checkout"

if TYPE_CHECKING:
    from tsjax.public import *  # noqa: F403
else:

    def __getattr__(name):
        """A public name, or a folder that these need: with the first one all are there."""
        if name == "__all__" or not name.startswith("__"):  # what inspect and the like look for
            import tsjax.public as public

            for known in (*public.__all__, "__all__"):
                globals().setdefault(known, getattr(public, known))
            if name in globals():
                return globals()[name]
        from tsjax.habits import OF_PACKAGE

        advice = f": write {OF_PACKAGE[name]}" if name in OF_PACKAGE else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")

    def __dir__():
        return [*globals(), *__getattr__("__all__")]
