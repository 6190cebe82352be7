"""A package, so that fixtures may have its scope: they end where the last test of this folder ends."""
