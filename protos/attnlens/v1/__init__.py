"""Version 1 of the protocol: `encoder_service`, `manifest` and `tensor`."""
