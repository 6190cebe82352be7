"""Analyses of a bundle's attention: head reports, lessons on single heads, and profiles of run time."""
