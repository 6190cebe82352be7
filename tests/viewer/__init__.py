"""Tests of the viewer. This is a package so that fixtures can have package scope."""
