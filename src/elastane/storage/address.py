"""The address of a buffer in memory, which Python does not give for a read-only one.

O_DIRECT requires memory that is aligned to blocks. Trying costs more than it seems: on ext4 such a
write first waits for all other writes to the file, and then fails. This module cannot fail.
"""

from __future__ import annotations

import ctypes


class _BufferView(ctypes.Structure):
    """Py_buffer, of the stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_SIMPLE = 0  # PyBUF_SIMPLE: contiguous bytes


def address_of(view: memoryview) -> int:
    """Return the address of a contiguous view's first byte."""
    buffer = _BufferView()
    ctypes.pythonapi.PyObject_GetBuffer(
        ctypes.py_object(view), ctypes.byref(buffer), ctypes.c_int(_SIMPLE)
    )
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
