"""Commands that create, check and list bundles."""
