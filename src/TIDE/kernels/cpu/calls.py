"""Calls of compiled CPU code by address.

numba compiles a function again into every other one that calls it. Products and attention are most of the code, and one of them
calls the other through four levels: they are compiled once, as C functions, and called at their addresses. Arrays travel as the
addresses of their data, and all arguments are whole numbers or floats.

    address_of(function)                     once, in Python
    call(address, (a, b, …))                 in compiled code
    floats(address, (rows, columns))         in the C function: the array that the caller has there
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

VERSION = 1  # counts changes of the code compiled here, for modules that compile it into their own


_kept: list[Any] = []  # compiled functions: their code goes with them


def address_of(function: Any, arguments: str) -> int:
    """Compile a parallel C function, or take it from numba's cache, and return its address.

    Args:
        arguments: their types, such as "int64, float32".
    """
    compiled = cfunc(f"void({arguments})", cache=True, parallel=True, fastmath=True)(function)
    _kept.append(compiled)
    return int(compiled.address)


@intrinsic
def call(context, address, arguments):  # type: ignore[no-untyped-def]
    """Call the C function at an address with a tuple of whole numbers and floats."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        kinds = [context.get_value_type(kind) for kind in signature.args[1].types]
        function = builder.inttoptr(values[0], ir.FunctionType(ir.VoidType(), kinds).as_pointer())
        builder.call(function, cgutils.unpack_tuple(builder, values[1]))
        return context.get_dummy_value()

    return types.void(address, arguments), generate


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(context, address):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
            return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(address), generate

    return pointer


_float_pointer, _byte_pointer = _pointer_to(types.float32), _pointer_to(types.int8)
_int_pointer, _long_pointer = _pointer_to(types.int32), _pointer_to(types.int64)


@njit(cache=True)
def floats(address, shape):  # type: ignore[no-untyped-def]
    """Return the fp32 array at an address."""
    return carray(_float_pointer(address), shape)


@njit(cache=True)
def signed_bytes(address, shape):  # type: ignore[no-untyped-def]
    """Return the int8 array at an address."""
    return carray(_byte_pointer(address), shape)


@njit(cache=True)
def ints(address, shape):  # type: ignore[no-untyped-def]
    """Return the int32 array at an address."""
    return carray(_int_pointer(address), shape)


@njit(cache=True)
def longs(address, shape):  # type: ignore[no-untyped-def]
    """Return the int64 array at an address."""
    return carray(_long_pointer(address), shape)
