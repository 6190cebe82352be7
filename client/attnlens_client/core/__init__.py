"""Implementation of the client without I/O: no connections, threads or sleeping.

Each method is a generator of steps (`calls`) that yields commands and receives events (`events`). `plans`
turns arguments into requests (`requests`, `splitting`) and replies into results (`replies`, `attention`,
`streams`, `explanations`, `models`). All replies are validated. The drivers execute the commands.
"""
