"""A package, so that fixtures may have its scope: pytest ends them where the last test of this folder ends."""
