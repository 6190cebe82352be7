"""Serving a model, whatever the protocol: jobs in, arrays and small dataclasses out.

`jobs` is what may be asked, `checks` makes plans of it, `service` carries them out, `results` is what comes
of it. `admission` counts what is inside, `sizes` what a call costs, `streams` bounds what of a stream is
under way, `workers` has the threads for what is slow.
"""
