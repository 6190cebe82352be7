"""The random models of every family, a module for each group of families."""

from family_cases import bert, decoders, distances, own_oracles, rotary

GROUPS = (bert.CASES, distances.CASES, rotary.CASES, decoders.CASES, own_oracles.CASES)
