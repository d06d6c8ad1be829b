"""Readers of measurements, one module or package per kind of file.

Each has ``read(paths, progress=None) -> Reading``, for all the files of its kind, and ``recognises(head, path)`` for
the first bytes of a file. They know formats and nothing of parallelism.
"""
