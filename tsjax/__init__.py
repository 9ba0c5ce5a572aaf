# SPDX-License-Identifier: Apache-2.0
"""tsjax: long text generation in JAX, with the same tokens as plain decoding.

The same in float32 and float64; in bfloat16 and float16 drafts may part from it at a near-tie.

The public names are those of public.py and of six modules.
"""

from importlib import import_module as _import_module
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from typing import TYPE_CHECKING
from warnings import warn as _warn

try:
    __version__ = _version("tsjax")
except _PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+checkout"

_MODULES = ("methods", "steps", "blocks", "training", "costs", "results")

if TYPE_CHECKING:
    from tsjax import blocks, costs, methods, results, steps, training  # noqa: F401
    from tsjax.public import *  # noqa: F403
else:

    def __getattr__(name):
        """A module, a public name, or a folder that these need: with the first all are there."""
        if name in _MODULES:
            return _import_module(f"tsjax.{name}")
        near = iter(())
        if name == "__all__" or not name.startswith("__"):  # what inspect and the like look for
            import tsjax.public as public

            for known in (*public.__all__, "__all__"):
                globals().setdefault(known, getattr(public, known))
            if name in globals():
                return globals()[name]
            for place in map(_import_module, (f"tsjax.{module}" for module in _MODULES)):
                if name in place.__all__:  # it was here; until the next release it is
                    new = f"{place.__name__}.{name}; the old name goes in the next release"
                    _warn(f"tsjax.{name} is now {new}", FutureWarning, stacklevel=2)
                    return globals().setdefault(name, getattr(place, name))
            near = (
                f"{place.__name__.removesuffix('.public')}.{known}"
                for place in (public, *(_import_module(f"tsjax.{one}") for one in _MODULES))
                for known in place.__all__
                if known.lower() == name.lower()
            )
        from tsjax.base.habits import OF_PACKAGE

        advice = OF_PACKAGE.get(name) or next(near, None)
        wanted = f": write {advice}" if advice else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{wanted}")

    def __dir__():
        return {*globals(), *__getattr__("__all__"), *_MODULES}
