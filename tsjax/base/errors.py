# SPDX-License-Identifier: Apache-2.0
"""The errors of this package. Each is one of Python's as well, so that `except ValueError` and the
like catch it.

Interrupted is none of them: it says that a run ended because somebody asked for it.
"""


class TsjaxError(Exception):
    """The base of all errors that tsjax raises by itself."""


class BadValue(TsjaxError, ValueError):
    """An argument, a file or a shape that is not valid: the message says what would be right."""


class BadType(TsjaxError, TypeError):
    """An argument of the wrong kind, or one that does not exist."""


class NoSuchFile(TsjaxError, FileNotFoundError):
    """A file or folder that is not there."""


class AlreadyThere(TsjaxError, FileExistsError):
    """A place that would have to be overwritten."""


class NotWritable(TsjaxError, PermissionError):
    """A place where nothing can be written."""


class NotAFile(TsjaxError, IsADirectoryError):
    """A folder in place of a file."""


class NotSupported(TsjaxError, NotImplementedError):
    """Something that exists elsewhere and not here."""


class NotEnoughMemory(TsjaxError, MemoryError):
    """A run that would not fit."""


class NotInstalled(TsjaxError, ImportError):
    """A package that is missing."""


class Failed(TsjaxError, RuntimeError):
    """Something that broke on the way."""
