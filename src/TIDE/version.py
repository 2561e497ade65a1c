"""The version of the package, by its metadata."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("tide-inference")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0+source"
