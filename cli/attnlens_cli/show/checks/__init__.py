"""How what was measured of a bundle is shown."""
