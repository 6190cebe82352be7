"""Requests to every method and route, and a record of what servers answer.

    python -m pytest tests/test_recorded_requests.py         compare with the record
    python tests/recorded_requests/record.py                 write the record, after a deliberate change

The record contains what clients and operators see: status, reason, field paths, wording, headers, the form of
the reply, metrics and log fields. `goldens.py` compares numbers.
"""
