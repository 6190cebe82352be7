"""The random models of every family, a module for each group of families."""

from family_cases import bert, big_bird, decoders, distances, own_oracles, rotary

GROUPS = (bert.CASES, big_bird.CASES, distances.CASES, rotary.CASES, decoders.CASES, own_oracles.CASES)
# The models that bundles are made of. Tests that use the same ones share their traces.
EXPORTED = {name: model for group in GROUPS for name, model in group.exported.items()}
