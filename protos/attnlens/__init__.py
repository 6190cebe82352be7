"""The contract between the parts of attnlens: `v1` holds the messages, `bundle` and `tensors` their use."""
