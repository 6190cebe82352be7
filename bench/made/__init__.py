"""What a run needs and makes once below `.bench/`: environments, bundles, a checkpoint, converted models."""
