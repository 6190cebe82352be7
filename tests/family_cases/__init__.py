"""The random models of every family, a module for each group of families."""

from family_cases import bert, distances, own_oracles, rotary

GROUPS = (bert.CASES, distances.CASES, rotary.CASES, own_oracles.CASES)
