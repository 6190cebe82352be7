"""What the client does, without doing it: no connection, no thread, no clock that waits.

A method of the client is a generator of steps (methods.py): it yields commands and is sent events
(events.py). calls.py and async_calls.py carry the commands out, each in its own way.
"""
