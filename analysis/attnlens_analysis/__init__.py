"""What a bundle's attention does, measured: heads, teaching, cost."""
