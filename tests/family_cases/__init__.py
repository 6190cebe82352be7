"""The random models of every family, a module for each group of families."""

from family_cases import bert, decoders, distances, rotary

GROUPS = (bert.CASES, distances.CASES, rotary.CASES, decoders.CASES)
