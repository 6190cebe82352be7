"""Locates published checkpoints, reads their files, and maps tensors to encoder parameters."""
