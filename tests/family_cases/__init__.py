"""The random models of every family, a module for each group of families."""

from family_cases import bert, big_bird, decoders, distances, own_oracles, rotary

GROUPS = (bert.CASES, big_bird.CASES, distances.CASES, rotary.CASES, decoders.CASES, own_oracles.CASES)
