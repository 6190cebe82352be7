"""Serving one model, independent of the protocol: typed requests in, arrays and small dataclasses out.

A request (`requests`) is validated into a plan (`validation`), admitted (`admission`), and executed by
`service`, which returns `results`. `costs` estimates memory, message sizes and computation in advance.
"""
